"""Plans by hand. See layouts/test_coverage for plans between random layouts, against a slow copy of every element."""

from collections import Counter

import numpy as np
import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import Box, TensorLayout
from megatron_rl.layouts.compile import hf_layouts, megatron_layouts
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.models import load_table
from megatron_rl.resharding.plan import Copy, make_plan
from tests.layouts.test_compile import HF, of_family

Layouts = dict[int, tuple[TensorLayout, ...]]


def tensor(name: str, shape: tuple[int, ...], *boxes: Box, dtype: str = "bfloat16") -> TensorLayout:
    return TensorLayout(name, shape, dtype, boxes)


def rows(hf: str, start: int, count: int, *, at: int = 0, cols: int = 5) -> Box:
    return Box(hf, (start, 0), (at, 0), (count, cols))


def test_a_destination_across_two_sources_is_two_copies() -> None:
    # Source ranks 4 and 7 hold rows 0:3 and 3:6; the destination wants rows 2:5 from its own row 1 on.
    sources = {4: [tensor("a", (3, 5), rows("w", 0, 3))], 7: [tensor("a", (3, 5), rows("w", 3, 3))]}
    assert make_plan(sources, {0: [tensor("b", (4, 5), rows("w", 2, 3, at=1))]}) == (
        Copy(4, 0, "a", (2, 0), "b", (1, 0), (1, 5)),
        Copy(7, 0, "a", (0, 0), "b", (2, 0), (2, 5)),
    )


def test_a_slot_is_the_first_number_of_an_offset() -> None:
    stacked = tensor("w13", (2, 6, 5), Box("e0", (0, 0), (0, 3, 0), (3, 5)), Box("e1", (0, 0), (1, 3, 0), (3, 5)))
    sources = {0: [tensor("fc1.0", (3, 5), rows("e0", 0, 3)), tensor("fc1.1", (3, 5), rows("e1", 0, 3))]}
    assert make_plan(sources, {0: [stacked]})[1] == Copy(0, 0, "fc1.1", (0, 0), "w13", (1, 3, 0), (3, 5))
    back = make_plan({0: [stacked]}, {0: [tensor("fc1.1", (1, 5), rows("e1", 2, 1))]})
    assert back == (Copy(0, 0, "w13", (1, 5, 0), "fc1.1", (0, 0), (1, 5)),)


def test_replicas_share_the_sending_by_bytes() -> None:
    # Rank 0 alone holds 60 float32 bytes of "big"; ranks 0, 1 and 2 all hold "x", "y", "z" of 30 bfloat16 bytes.
    small = [tensor(n, (3, 5), rows(n, 0, 3)) for n in "xyz"]
    big = tensor("big", (3, 5), rows("big", 0, 3), dtype="float32")
    plan = make_plan({0: [big, *small], 1: small, 2: small}, {0: [big, *small]})
    # Ranks 1 and 2 share the 90 bytes: "x" lies in the first 45 of them, and the middles of "y" and "z" in the others.
    assert [(copy.src, copy.src_rank) for copy in plan] == [("big", 0), ("x", 1), ("y", 2), ("z", 2)]


def test_an_element_without_source_is_named() -> None:
    sources = {0: [tensor("a", (3, 5), rows("w", 0, 3))]}
    with pytest.raises(
        LayoutError, match=r"b on destination rank 2: 10 of 25 elements of w \[0:5, 0:5\] have no source"
    ):
        make_plan(sources, {2: [tensor("b", (5, 5), rows("w", 0, 5))]})
    with pytest.raises(LayoutError, match="c on destination rank 2: 5 of 5 elements of v"):
        make_plan(sources, {2: [tensor("c", (1, 5), rows("v", 0, 1))]})


def test_an_element_with_two_unlike_sources_is_named() -> None:
    sources = {0: [tensor("a", (3, 5), rows("w", 0, 3))], 5: [tensor("a", (4, 5), rows("w", 2, 4))]}
    with pytest.raises(LayoutError, match=r"w: source rank 0 holds \[0:3, 0:5\] and source rank 5 holds \[2:6, 0:5\]"):
        make_plan(sources, {0: [tensor("b", (2, 5), rows("w", 0, 2))]})


def test_a_destination_written_twice_is_named() -> None:
    sources = {0: [tensor("a", (6, 5), rows("w", 0, 6))]}
    twice = tensor("b", (4, 5), rows("w", 0, 3), rows("w", 3, 2, at=2))
    with pytest.raises(LayoutError, match=r"b on destination rank 1: w at \(0, 0\) and w at \(2, 0\) overlap"):
        make_plan(sources, {1: [twice]})


@pytest.mark.parametrize("family", sorted(HF))
def test_no_replica_is_ahead_of_another_by_more_than_four_rectangles(family: str) -> None:
    table, topology = load_table(HF[family]), of_family(family, MegatronTopology(world_size=6, num_layers=4, tp=2))
    sources = {r: megatron_layouts(table, topology, r, dtype="bfloat16") for r in range(6)}
    plan = make_plan(sources, {0: hf_layouts(table, dtype="bfloat16")})
    sent: Counter[int] = Counter()
    for copy in plan:
        sent[copy.src_rank] += int(np.prod(copy.shape))
    largest = max(int(np.prod(copy.shape)) for copy in plan)
    # A rank is in two pools, that of its share of what tp cuts and that of the rest. In each, its part of the bytes
    # may end within a rectangle on both sides, which moves it by half of one: by two in all, and another rank too.
    assert max(sent.values()) - min(sent[r] for r in range(6)) <= 4 * largest
