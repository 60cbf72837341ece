from math import inf, nan

import pytest
import torch
from megatron_rl_kernels import quantize_boxes, reference
from megatron_rl_kernels.quantize_table import compile_quantize
from torch import Tensor

from megatron_rl.errors import LayoutError
from tests.kernels.views import Cut, bits, weights


def quantized(*parts: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    rows, columns = sum(len(p) for p in parts), parts[0].shape[1]
    to = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    quantize_boxes([to], [scale], [parts], power_of_two=power_of_two)
    return to, scale


@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        ([896.0, -2.0, 17.0, 0.0], 2.0, [448.0, -1.0, 8.5, 0.0]),
        # 8.5 lies between 8 and 9, 9.5 between 9 and 10: halfway goes to the even mantissa.
        ([448.0, 8.5, 9.5, -9.5], 1.0, [448.0, 8.0, 10.0, -10.0]),
        ([0.0, 0.0, -0.0, 0.0], 1.0, [0.0, 0.0, -0.0, 0.0]),
        # 448 * 2^-140 / 448 is subnormal, so the scale is 2^-126: what is left of the values is 448 * 2^-14.
        ([448 * 2.0**-140, 0.0, 0.0, -(2.0**-131)], 2.0**-126, [448 * 2.0**-14, 0.0, 0.0, -(2.0**-5)]),
    ],
)
def test_values_are_divided_by_a_448th_of_the_largest(values: list[float], scale: float, expected: list[float]) -> None:
    to, found = quantized(torch.tensor([values]))

    assert found.tolist() == [[scale]]
    assert torch.equal(bits(to), bits(torch.tensor([expected]).to(torch.float8_e4m3fn)))


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (447.0, 1.0), (0.0, 1.0)])
def test_powers_of_two_are_rounded_up(largest: float, scale: float) -> None:
    to, found = quantized(torch.tensor([[largest, 0.0]]), power_of_two=True)

    assert found.tolist() == [[scale]]
    assert to[0, 0].float() * scale == torch.tensor(largest / scale).to(torch.float8_e4m3fn).float() * scale


def test_each_block_has_a_scale_of_its_own() -> None:
    source = torch.zeros(130, 260)
    source[127, 127], source[128, 128], source[129, 259] = 448.0, -4480.0, 44800.0

    _, scale = quantized(source[:50], source[50:])

    assert scale.tolist() == [[1.0, 1.0, 1.0], [1.0, 10.0, 100.0]]


@pytest.mark.parametrize("bad", [nan, -nan, inf, -inf])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad: float, power_of_two: bool) -> None:
    source = torch.ones(2, 256)
    source[1, 3] = bad

    to, scale = quantized(source, power_of_two=power_of_two)

    back = to.float() * scale.repeat_interleave(128, dim=1)
    assert back[:, :128].isnan().all() and (back[:, 128:] - 1).abs().max() < 0.07  # 3 bits of mantissa


def test_other_shapes_are_refused() -> None:
    to, scale = torch.zeros(3, 4).to(torch.float8_e4m3fn), torch.zeros(1, 1)

    with pytest.raises(LayoutError, match=r"\('bfloat16', \[2, 4\]\)"):
        quantize_boxes([to], [scale], [[torch.zeros(2, 4, dtype=torch.bfloat16)]])
    with pytest.raises(LayoutError, match="float32 scales"):
        quantize_boxes([to], [scale.bfloat16()], [[torch.zeros(3, 4)]])


@pytest.mark.interpreted
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_kernel_equals_the_reference(dtype: torch.dtype, aligned: bool, power_of_two: bool) -> None:
    """Two tensors in one call: gathered from three pieces, and one of another number of blocks."""
    from megatron_rl_kernels.triton_ops import quantize_boxes as kernel

    torch.manual_seed(0)
    pieces = weights(dtype, aligned=aligned)
    sources = [pieces, [pieces[0][10:30, 32:48]]]
    shapes = [(141, pieces[0].shape[1]), (20, 16)]

    def outputs() -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        views = [
            cut.view(d)
            for shape in shapes
            for cut, d in (
                (Cut(shape, (1, 16), (1, 16 if aligned else 3), 1, (0, 1)), torch.float8_e4m3fn),
                (Cut((-(-shape[0] // 128), -(-shape[1] // 128)), (0, 1), (1, 0), 1, (1, 0)), torch.float32),
            )
        ]
        memories, found = [m for m, _ in views], [v for _, v in views]
        return memories[::2], memories[1::2], found[::2], found[1::2]

    got, got_scales, to, scales = outputs()
    tables = compile_quantize(to, scales, sources, power_of_two=power_of_two)
    kernel.launch(tables)

    want, want_scales, want_to, want_scale_views = outputs()
    reference.quantize_boxes(want_to, want_scale_views, sources, power_of_two=power_of_two)
    assert [(t.aligned, len(t.tiles.row_of_tile)) for t in tables] == [(aligned, 7)]
    assert all(torch.equal(a, b) for a, b in zip(got + got_scales, want + want_scales, strict=True))


@pytest.mark.interpreted
def test_the_kernel_rounds_every_bfloat16_as_the_reference() -> None:
    from megatron_rl_kernels.triton_ops import quantize_boxes as kernel

    source = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    to, scale = torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.zeros(2, 2)
    want, want_scale = to.clone(), scale.clone()

    kernel.prepare([to], [scale], [[source[64:192], source[:64], source[192:]]])()

    reference.quantize_boxes([want], [want_scale], [[source[64:192], source[:64], source[192:]]])
    assert torch.equal(bits(to), bits(want)) and torch.equal(bits(scale), bits(want_scale))
