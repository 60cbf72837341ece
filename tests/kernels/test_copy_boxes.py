import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_rl_kernels import copy_boxes, prepare, reference
from megatron_rl_kernels.copy_table import CAST_ELEMENT, CAST_VECTOR, KIND, compile_copy

from megatron_rl.errors import LayoutError
from tests.kernels.views import DTYPES, Cut, bits, cuts, random, shapes


def test_rectangles_land_where_they_belong_and_nowhere_else() -> None:
    source = torch.arange(35, dtype=torch.float32).view(5, 7)
    destination = torch.full((4, 9), float("nan"))

    copy_boxes([destination[1:3, 2:5], destination[3:, :1]], [source[2:4, 1:4], source[:1, 6:]])

    expected = torch.full((4, 9), float("nan"))
    expected[1, 2:5] = torch.tensor([15.0, 16.0, 17.0])
    expected[2, 2:5] = torch.tensor([22.0, 23.0, 24.0])
    expected[3, 0] = 6.0
    assert torch.equal(destination.isnan(), expected.isnan())
    assert torch.equal(destination.nan_to_num(-1), expected.nan_to_num(-1))


def test_a_cast_rounds_to_nearest_even() -> None:
    destination = torch.zeros(3, dtype=torch.bfloat16)

    copy_boxes([destination], [torch.tensor([1.00390625, 1.01171875, -1.00390625])])  # halfway between two bfloat16

    assert destination.tolist() == [1.0, 1.015625, -1.0]


def test_a_prepared_copy_copies_what_is_there_when_it_is_called() -> None:
    source, destination = torch.tensor([1.0, 2.0]), torch.zeros(2)
    copy = prepare(copy_boxes, [destination], [source])

    source += 4
    copy()

    assert destination.tolist() == [5.0, 6.0]


def test_nothing_to_copy_is_nothing_done() -> None:
    copy_boxes([], [])


def test_different_shapes_are_refused() -> None:
    for copy in (copy_boxes, compile_copy):
        with pytest.raises(LayoutError, match=r"Pair 0: destination \[2, 3\], source \[3, 2\]"):
            copy([torch.zeros(2, 3)], [torch.zeros(3, 2)])


def test_a_kernel_refuses_casts_that_it_does_not_know() -> None:
    with pytest.raises(LayoutError, match=r"from torch.float16 to torch.bfloat16"):
        compile_copy([torch.zeros(2, dtype=torch.bfloat16)], [torch.zeros(2, dtype=torch.float16)])


@pytest.mark.parametrize(
    ("rows", "columns", "first", "kind"),
    [
        *[(3, 64, 0, 16), (3, 64, 8, 16), (3, 64, 4, 8), (3, 64, 2, 4), (3, 64, 1, 2), (3, 60, 0, 8)],
        (1, 62, 0, 4),
        (3, 96, 0, 16),  # whole rows of 96: one run of 288
    ],
)
def test_the_widest_access_that_fits_is_taken(rows: int, columns: int, first: int, kind: int) -> None:
    memory = torch.zeros(5, 96, dtype=torch.bfloat16)
    view = memory[:rows, first : first + columns]

    table = compile_copy([view], [view])

    assert table.tiles.rows[:, KIND].tolist() == [kind]


@pytest.mark.interpreted
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), count=st.integers(1, 3))
def test_the_kernel_copies_every_bit_and_writes_nothing_else(data: st.DataObject, count: int) -> None:
    from megatron_rl_kernels.triton_ops import copy_boxes as kernel

    torch.manual_seed(0)
    pairs = []
    for _ in range(count):
        shape, dtype = data.draw(shapes), data.draw(st.sampled_from(DTYPES))
        to, of = data.draw(cuts(shape)), data.draw(cuts(shape))
        _, source = of.view(dtype)
        source.copy_(random(shape, dtype))
        pairs.append((to.view(dtype), to.view(dtype), source))

    kernel.prepare([got for (_, got), _, _ in pairs], [source for _, _, source in pairs])()

    reference.copy_boxes([want for _, (_, want), _ in pairs], [source for _, _, source in pairs])
    for (got, _), (want, _), _ in pairs:
        assert torch.equal(got, want)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_copies_more_than_a_tile_on_the_bulk_path(dtype: torch.dtype) -> None:
    from megatron_rl_kernels.triton_ops import copy_boxes as kernel

    torch.manual_seed(0)
    cut = Cut((3, 5, 3072), (0, 1, 16), (0, 2, 32), 1, (0, 1, 2))
    (got, to), (want, want_view), (_, source) = cut.view(dtype), cut.view(dtype), cut.view(dtype)
    source.copy_(random((3, 5, 3072), dtype))
    table = compile_copy([to], [source])

    kernel.launch(table)

    reference.copy_boxes([want_view], [source])
    assert table.tiles.rows[:, KIND].tolist() == [16] and len(table.tiles.row_of_tile) > 1
    assert torch.equal(got, want)


@pytest.mark.interpreted
@pytest.mark.parametrize(("before", "kind"), [(16, CAST_VECTOR), (3, CAST_ELEMENT)])
def test_the_kernel_rounds_as_torch_does(before: int, kind: int) -> None:
    """NaNs stay NaNs; which of them, torch itself does not keep."""
    from megatron_rl_kernels.triton_ops import copy_boxes as kernel

    torch.manual_seed(0)
    shape = (9, 320)
    cut = Cut(shape, (1, before), (0, 8), 1, (0, 1))
    (got, to), (want, want_view) = cut.view(torch.bfloat16), cut.view(torch.bfloat16)
    source = Cut(shape, (0, before - before % 4), (2, 8), 1, (0, 1)).view(torch.float32)[1]
    source.copy_(random(shape, torch.float32))
    source[0, :4] = torch.tensor([1.00390625, 3.4e38, -1e-40, -torch.inf])
    table = compile_copy([to], [source])

    kernel.launch(table)

    reference.copy_boxes([want_view], [source])
    assert table.tiles.rows[:, KIND].unique().tolist() == [kind]
    assert to.isnan().sum() > 3 and torch.equal(to.isnan(), want_view.isnan())
    same = bits(got.view(torch.bfloat16)) == bits(want.view(torch.bfloat16))
    assert (same | got.view(torch.bfloat16).isnan()).all()
