import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_rl_kernels.boxes import boxes_of
from megatron_rl_kernels.copy_table import compile_copy
from megatron_rl_kernels.quantize_table import compile_quantize
from megatron_rl_kernels.triton_ops.checksum_boxes import compile_checksum
from megatron_rl_kernels.triton_ops.delta_boxes import compile_delta
from torch import Tensor

from megatron_rl.errors import LayoutError


def quantize(source: Tensor) -> Any:
    to, scale = torch.zeros(source.shape).to(torch.float8_e4m3fn), torch.zeros(1, 1)
    return compile_quantize([to], [scale], [[source]], power_of_two=False)


@pytest.mark.parametrize(
    "compile_table",
    [
        lambda source: compile_copy([torch.zeros(2, 3)], [source]),
        quantize,
        lambda source: compile_delta([source], [torch.zeros(2, 3)]),
        lambda source: compile_checksum([source]),
    ],
    ids=["copy", "quantize", "delta", "checksum"],
)
def test_a_table_keeps_alive_what_it_has_the_addresses_of(compile_table: Callable[[Tensor], Any]) -> None:
    source = torch.zeros(2, 3)
    alive = weakref.ref(source)

    table = compile_table(source)
    del source

    assert table and alive() is not None


def test_dims_that_are_contiguous_on_both_sides_are_one() -> None:
    to, of = torch.zeros(5, 4, 6, 8), torch.zeros(5, 4, 12, 8)

    (box,) = boxes_of(to, of[:, :, :6])
    (whole,) = boxes_of(to, to)

    # 4 x 5 planes of 6 x 8: 20 runs of 48 floats, 96 floats from run to run in the source.
    assert (box.shape, box.destination_strides, box.source_strides) == ((1, 20, 48), (0, 192, 4), (0, 384, 4))
    assert whole.shape == (1, 1, 960)


def test_a_rectangle_whose_units_need_more_than_32_bits_is_refused() -> None:
    large = torch.empty(2**31 - 1023, dtype=torch.uint8, device="meta")

    with pytest.raises(LayoutError, match="2147482625 elements is above 2147482624: cut it in two"):
        list(boxes_of(large, large))


def test_more_than_three_dims_become_several_rectangles() -> None:
    to, of = torch.zeros(3, 2, 4, 8), torch.zeros(3, 5, 8, 16)[:, :4:2, ::2, ::2]

    boxes = list(boxes_of(to, of))

    assert [box.shape for box in boxes] == [(2, 4, 8)] * 3
    assert [box.source - of.data_ptr() for box in boxes] == [0, 5 * 8 * 16 * 4, 2 * 5 * 8 * 16 * 4]
    with pytest.raises(LayoutError, match="more than three dims"):
        compile_delta([of], [to])
