"""Who sends to whom, by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import Box, TensorLayout
from megatron_rl.resharding.lanes import Lanes, make_lanes
from megatron_rl.resharding.plan import cut
from megatron_rl.resharding.schedule import make_schedule, receives, sends
from megatron_rl.resharding.spec import Placement, SyncSpec
from megatron_rl.resharding.tables import join
from tests.resharding.pushing import make_spec

Flow = tuple[tuple[int, ...], tuple[int, ...]]


def lanes_of(
    flows: list[Flow], nbytes: list[int], trainers: list[tuple[int, int]], engines: list[tuple[int, int]]
) -> Lanes:
    return make_lanes(flows, nbytes, dict(enumerate(trainers)), dict(enumerate(engines)))


def shares(ends: np.ndarray) -> list[int]:
    return np.diff(ends, prepend=0).tolist()


def test_the_holder_on_the_device_sends_then_those_on_the_node_then_all() -> None:
    # Trainer ranks on devices 0 and 1 of node 0, and on node 1; readers on those two, beside them, and on node 2.
    lanes = lanes_of(
        [((0, 1, 2), (0, 1, 2, 3))], [40], [(0, 0), (0, 1), (1, 0)], [(0, 0), (0, 1), (0, 2), (2, 0)]
    ).lanes

    assert [(lane.kind, lane.pool, lane.readers) for lane in lanes] == [
        ("local", (0,), (0,)),
        ("local", (1,), (1,)),
        ("node", (0, 1), (2,)),
        ("network", (0, 1, 2), (3,)),
    ]


def test_what_several_ranks_of_a_node_want_is_one_lane_and_they_share_the_fetching() -> None:
    # Reader 0 fetches 10 of its own; 50 that all three want: 13 for reader 0, then 20 and 20 (the rest to the lowest).
    flows: list[Flow] = [((0,), (0,)), ((0,), (0, 1, 2))]
    lanes = lanes_of(flows, [10, 50], [(0, 0)], [(1, 0), (1, 1), (1, 2)])

    assert [lane.readers for lane in lanes.lanes] == [(0,), (0, 1, 2)]
    assert shares(lanes.fetchers[0, 1, 2]) == [10, 20, 20]
    both = lanes_of(flows, [10, 50], [(0, 0)], [(1, 0), (2, 1), (2, 2)]).lanes
    assert [(lane.readers, lane.nbytes) for lane in both] == [((0,), 60), ((1, 2), 50)]


def test_replicas_make_up_for_what_only_one_of_them_holds() -> None:
    # 60 bytes that rank 0 alone holds, 33 that 2 and 3 share. Then 90 that 0, 1 and 2 hold: 54 of rank 1 and 36 of 2,
    # which has 17 already, and nothing of 0.
    flows: list[Flow] = [((0,), (0,)), ((0, 1, 2), (0,)), ((2, 3), (0,))]
    lanes = lanes_of(flows, [60, 90, 33], [(r, 0) for r in range(4)], [(9, 0)])

    assert shares(lanes.senders["network", (2, 3)]) == [17, 16]
    assert shares(lanes.senders["network", (0, 1, 2)]) == [0, 54, 36]


def test_a_pool_deals_out_the_bytes_of_all_its_lanes_in_turn() -> None:
    # Ranks 0 and 1 send 80 bytes, 40 each: 30 to reader 0, then to readers 1 and 2, of one node, 10 and 40. These two
    # fetch 70 bytes, 35 each: 20 of rank 2, then those 10 and 40.
    flows: list[Flow] = [((2,), (1, 2)), ((0, 1), (0,)), ((0, 1), (1, 2))]
    lanes = lanes_of(flows, [20, 30, 50], [(0, 0), (1, 0), (2, 0)], [(5, 0), (6, 0), (6, 1)])

    dealt = [list(lanes.deal(lane, np.array(n))) for lane, n in zip(lanes.lanes, ([20], [30], [10, 40]), strict=True)]

    one, other = slice(0, 1), slice(1, 2)
    assert dealt == [[(2, 1, one)], [(0, 0, one)], [(0, 1, one), (1, 2, other)]]


def test_a_rectangle_larger_than_a_message_is_cut_along_rows_then_columns() -> None:
    boxes = TensorLayout("b", (5, 12), "float32", (Box("w", (0, 0), (0, 0), (5, 12)),))
    joined = join({0: [boxes]}, {0: [boxes]})

    by_rows = cut(joined, 96)  # two rows of 48 bytes
    assert by_rows.start.tolist() == [[0, 0], [2, 0], [4, 0]] and by_rows.size.tolist() == [[2, 12], [2, 12], [1, 12]]
    by_columns = cut(joined, 32)  # eight of a row's elements: six and six
    assert by_columns.start.tolist() == [[row, column] for row in range(5) for column in (0, 6)]
    assert by_columns.nbytes.tolist() == [24] * 10
    assert cut(joined, 240).size.tolist() == [[5, 12]]


def apart(spec: SyncSpec) -> SyncSpec:
    """Every rank on a node of its own."""
    ours, theirs = spec.trainer.world_size, spec.readers
    places = [(i, 0) for i in range(ours + theirs)]
    return replace(spec, placement=Placement(tuple(places[:ours]), tuple(places[ours:])))


@pytest.mark.parametrize(("engines", "at_once"), [(1, 2), (2, 1), (3, 1)])
def test_the_senders_of_a_round_address_different_readers(engines: int, at_once: int) -> None:
    spec = apart(replace(make_spec("qwen3_moe", "pp2_vpp2_ep2", "tp2"), engines=engines))
    schedule = make_schedule(spec)
    order = sorted((m for r in range(4) for m in sends(schedule, r)), key=lambda m: m.number)

    assert len(order) == 4 * spec.readers and {m.kind for m in order} == {"network"}
    for at in range(0, len(order), 4):
        assert {m.src for m in order[at : at + 4]} == {0, 1, 2, 3}
        assert max(Counter(m.fetcher for m in order[at : at + 4]).values()) == at_once


def test_digests_differ_when_the_two_sides_do() -> None:
    spec = apart(make_spec("qwen3_moe", "tp2_ep2", "tp2", "bfloat16"))
    theirs = [spec, replace(spec, engine_dtype="float16"), replace(spec, bucket_bytes=5000)]
    ours = {m.digest for r in range(4) for m in sends(make_schedule(spec), r) if 1 in m.readers}
    same, other_dtype, other_size = ({m.digest for m in receives(make_schedule(s), 1)} for s in theirs)

    assert same == ours
    assert not ours & other_dtype
    assert ours != other_size


def test_what_cannot_be_planned_is_refused() -> None:
    spec = make_spec("qwen3_moe", "tp2_ep2", "tp2")
    with pytest.raises(LayoutError, match="The topology places 5 layers"):
        make_schedule(replace(spec, trainer=replace(spec.trainer, num_layers=5)))
