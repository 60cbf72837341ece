import pytest
import torch
from megatron_rl_kernels.reference import copy_boxes


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


def test_nothing_to_copy_is_nothing_done() -> None:
    copy_boxes([], [])


def test_different_shapes_are_refused() -> None:
    with pytest.raises(RuntimeError):
        copy_boxes([torch.zeros(2, 3)], [torch.zeros(3, 2)])
