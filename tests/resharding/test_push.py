"""A push from rank to rank: every byte compared, and every way in which one end can fail the other."""

from dataclasses import replace

import pytest

from megatron_rl.resharding.spec import Placement
from tests.resharding.pushing import make_spec, pushing
from tests.tiny import TINY

TWO_NODES = Placement(((0, 0), (0, 1), (1, 0), (1, 1)), ((1, 2), (1, 3), (2, 0), (2, 1)))


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("engine", ["tp1", "tp2"])
def test_every_engine_rank_gets_exactly_its_own_bytes(family: str, engine: str) -> None:
    with pushing(make_spec(family, "tp2_ep2", engine, bucket_bytes=4096)) as it:
        sent, loaded = it.push()

        assert it.is_complete()
        for report, want in zip(loaded, it.wanted, strict=True):
            assert report.received_bytes == report.needed_bytes <= sum(t.nbytes for t in want.values())
        assert all(report.staging_bytes <= 2 * 4096 for report in (*sent, *loaded))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_bytes_cross_nodes_once_and_are_handed_on_inside(family: str) -> None:
    spec = make_spec(family, "pp2_vpp2_ep2", "tp2", engines=2, placement=TWO_NODES, bucket_bytes=4096)
    with pushing(spec) as it:
        _, loaded = it.push()

        assert it.is_complete()
        assert all(report.received_bytes == report.needed_bytes for report in loaded)


def test_a_rectangle_that_a_reader_puts_in_two_places_is_received_once() -> None:
    with pushing(make_spec("qwen3_moe", "one", "tp1")) as it:
        reader = it.receivers[0]
        reader._messages = tuple(replace(message, pieces=message.pieces * 2) for message in reader._messages)
        _, (report,) = it.push()

        assert it.is_complete()
        assert report.received_bytes == report.covered_bytes == report.needed_bytes
