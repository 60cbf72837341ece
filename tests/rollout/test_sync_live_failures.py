"""Pushes into real servers that fail: damaged, without memory, killed. Follows test_sync_live.py, which needs all."""

import os
import re
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import SyncError
from megatron_rl.resharding.sync import EngineSync
from tests.resharding.pushing import before_offer, flip_a_bit
from tests.rollout.conftest import Engines
from tests.rollout.pushes import WAITING, RankHere, Servers
from tests.rollout.servers import greedy_text, schedulers, state_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

SOON_S = 30.0


def test_an_error_on_one_rank_names_it_and_a_later_push_heals(
    engines: Engines, fresh: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = engines.servers[2]
    good = engines.from_one_rank()
    other = RankHere(engines.other, good)
    sync = EngineSync(other, Servers(server), good, **WAITING)
    narrow = replace(good, engine_dtype="bfloat16")

    with monkeypatch.context() as patch:
        flip_a_bit(patch)
        with pytest.raises(
            SyncError, match=r"engine 0 rank \d: the \d+ bytes at \d+ of message .*trainer rank 0 .*checksum"
        ):
            sync.push(version=7)
    with pytest.raises(SyncError, match="may hold a mixture of weights"):
        greedy_text(server)
    with pytest.raises(
        SyncError, match=r"(?s)engine rank 0: LayoutError.*float32, declared .*engine rank 1: LayoutErr"
    ):
        EngineSync(RankHere(engines.other, narrow), Servers(server), narrow, **WAITING).push(version=8)
    sync.push(version=9)
    assert state_of(server) != fresh[2]
    EngineSync(RankHere(engines.path, good), Servers(server), good, **WAITING).push(version=10)

    assert state_of(server) == fresh[2]


def test_an_engine_rank_without_memory_is_named_with_the_tensors_and_takes_the_next_push(
    engines: Engines, fresh: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, spec = engines.servers[2], engines.from_one_rank()
    _, starved = schedulers(server.pid())
    usual = resource.prlimit(starved, resource.RLIMIT_AS)

    def starve() -> None:
        held = int(Path(f"/proc/{starved}/statm").read_text().split()[0]) * resource.getpagesize()
        # Nor enough to map the trainer's buffer when those of the last session are gone.
        resource.prlimit(starved, resource.RLIMIT_AS, (held - (8 << 20), usual[1]))

    named = (
        r"engine rank 1: SyncError: engine 0 rank 1, from trainer rank 0: model\.\S.*Cannot allocate memory.*push again"
    )
    try:
        with monkeypatch.context() as patch, pytest.raises(SyncError, match=named):
            before_offer(patch, 1, starve)
            EngineSync(RankHere(engines.other, spec), Servers(server), spec, **WAITING).push(version=30)
    finally:
        resource.prlimit(starved, resource.RLIMIT_AS, usual)
    EngineSync(RankHere(engines.path, spec), Servers(server), spec, **WAITING).push(version=31)

    assert state_of(server) == fresh[2]


def test_a_scheduler_that_is_killed_in_the_middle_of_a_push_ends_it_soon_for_all(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this file: the server does not survive it."""
    spec = engines.from_one_rank(bucket_bytes=1 << 14)
    sync = EngineSync(RankHere(engines.path, spec), Servers(engines.twin), spec, **WAITING)
    sync.push(version=40)
    _, second = schedulers(engines.twin.pid())
    begin = time.monotonic()

    with monkeypatch.context() as patch, pytest.raises(SyncError) as raised:
        before_offer(patch, 5, lambda: os.kill(second, signal.SIGKILL))
        sync.push(version=41)

    assert time.monotonic() - begin < SOON_S
    said = r"(?s)engine-twin did not take the weights: .*: sglang::scheduler_TP1 is gone\.\s.*engine-twin\.log"
    assert re.match(said, str(raised.value)), str(raised.value)
    told = sync._running["trainer-0"].exception()
    assert str(told).startswith("engine 0 rank 1 ended in the middle of a weight update; its log says why.")
    with pytest.raises(SyncError, match="engine-twin may hold a mixture of weights"):
        greedy_text(engines.twin)
