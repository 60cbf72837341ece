"""Overlapping rectangles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.layouts.boxes import find_overlap

pair = st.tuples(st.integers(0, 6), st.integers(0, 6))
rectangles = st.lists(st.tuples(pair, st.tuples(st.integers(1, 3), st.integers(1, 3))), max_size=8)


def test_neighbours_do_not_overlap() -> None:
    assert find_overlap([((0, 0), (2, 3)), ((2, 0), (1, 3)), ((0, 3), (3, 1))]) is None


def test_the_two_that_overlap_are_named() -> None:
    assert find_overlap([((4, 0), (1, 9)), ((0, 0), (2, 3)), ((1, 2), (1, 1))]) == (1, 2)


@given(rectangles)
def test_an_overlap_is_found_exactly_when_an_element_is_painted_twice(found: list) -> None:
    painted = np.zeros((9, 9), int)
    for (row, col), (rows, cols) in found:
        painted[row : row + rows, col : col + cols] += 1
    assert (find_overlap(found) is not None) == (painted.max() > 1)
