"""The driver of pushes, over both sides in this process: what it waits for, and what engines do meanwhile."""

import concurrent.futures
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.errors import SyncError
from megatron_rl.resharding import sync
from megatron_rl.resharding.spec import LoadReport, Push, SyncSpec
from megatron_rl.resharding.sync import EngineSync
from megatron_rl.resharding.transport import links
from tests.resharding.pushing import Pushing, make_spec


class Both(Pushing):
    """Every rank a call of its own. Satisfies `sync.WeightSender` and `sync.WeightReceiver`."""

    def __init__(self, spec: SyncSpec):
        super().__init__(spec)
        self.pool = ThreadPoolExecutor(len(self.senders) + len(self.receivers) + 8)
        self.calls: dict[str, Future[Any]] = {}
        self.steps: list[str] = []

    def meeting(self) -> str:
        return f"127.0.0.1:{self.store.port}"

    def pause(self) -> None:
        self.steps.append(f"pause, {sum(not call.done() for call in self.calls.values())} calls running")

    def sending(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        return self._begin({f"trainer-{r}": (sender.send, self.tensors[r], push) for r, sender in self.senders.items()})

    def loading(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        return self._begin({f"engine-{i}": (self._load, i, push) for i in range(len(self.receivers))})

    def commit(self, version: int) -> None:
        self.steps.append(f"commit {version}")

    def _load(self, reader: int, push: Push) -> list[LoadReport]:
        return [self.receivers[reader].receive(self.parameters[reader], push)]

    def _begin(self, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Future[Any]]:
        begun = {name: self.pool.submit(*call) for name, call in calls.items()}
        self.calls.update(begun)
        return begun


def gather(calls: Mapping[str, Future[Any]]) -> list[Any]:
    """Results in order, or the first failure, whatever still runs."""
    done, _ = concurrent.futures.wait(calls.values(), 30, return_when=concurrent.futures.FIRST_EXCEPTION)
    for call in done:
        call.result()
    return [call.result() for call in calls.values()]


def still_running(calls: Mapping[str, Future[Any]], timeout_s: float) -> list[str]:
    _, late = concurrent.futures.wait(calls.values(), timeout_s)
    return [name for name, call in calls.items() if call in late]


@pytest.fixture
def both() -> Iterator[tuple[Both, EngineSync]]:
    it = Both(make_spec("qwen3_moe", "tp2_ep2", "tp2"))
    yield it, EngineSync(it, it, it.spec, gather=gather, still_running=still_running)
    it.close()


@pytest.fixture
def late(both: tuple[Both, EngineSync], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A first push has failed, and engine 1 has not begun its call yet: it does when the event is set."""
    it, engines = both
    receive, goes_on = it.receivers[1].receive, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(it.receivers[1], "receive", lambda *args: (goes_on.wait(30), receive(*args))[1])
        patch.setattr(links, "STALL_S", 1.0)
        with pytest.raises(SyncError):
            engines.push(version=1)
    yield goes_on
    goes_on.set()


def test_a_push_waits_for_what_still_runs_of_the_one_that_failed(
    both: tuple[Both, EngineSync], late: threading.Event
) -> None:
    it, engines = both
    assert not it.calls["engine-1"].done()
    threading.Timer(0.5, late.set).start()

    engines.push(version=2)

    assert it.steps == ["pause, 0 calls running", "pause, 0 calls running", "commit 2"]
    assert it.is_complete()


def test_what_does_not_end_is_named_and_a_later_push_succeeds(
    both: tuple[Both, EngineSync], late: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, engines = both
    with monkeypatch.context() as patch:
        patch.setattr(sync, "LAST_CALLS_S", 0.2)
        with pytest.raises(SyncError, match=r"^engine-1 did not end the push before, which failed.*stay paused"):
            engines.push(version=2)
    late.set()

    engines.push(version=3)

    assert it.steps == ["pause, 0 calls running", "pause, 0 calls running", "commit 3"]
    assert it.is_complete()


@pytest.mark.parametrize("more", [-4, 4])
def test_a_rank_that_got_less_or_more_than_its_parameters_hold_is_no_commit(
    both: tuple[Both, EngineSync], monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    it, engines = both
    receive = it.receivers[1].receive

    def receive_otherwise(*args: Any) -> LoadReport:
        report = receive(*args)
        return replace(report, covered_bytes=report.covered_bytes + more)

    with monkeypatch.context() as patch:
        patch.setattr(it.receivers[1], "receive", receive_otherwise)
        with pytest.raises(SyncError, match=r"take (\d+) bytes and (?!\1)\d+ arrived: the layout table leaves out or"):
            engines.push(version=1)
    assert it.steps == ["pause, 0 calls running"]

    engines.push(version=2)

    assert it.steps[-1] == "commit 2" and it.is_complete()
