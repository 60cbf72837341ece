"""One push of the trainer's weights into every engine, from pause to commit. Bytes go from rank to rank, not here."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_rl.errors import SyncError
from megatron_rl.resharding.spec import LoadReport, Push, SendReport, SyncSpec

logger = logging.getLogger(__name__)

LAST_CALLS_S = 30.0
"""For the calls of a push that failed to end: what each of them waits for has a shorter deadline."""


class WeightSender(Protocol):
    """The trainer, as far as a push needs it."""

    def meeting(self) -> str:
        """host:port of a TCPStore that all ranks reach."""
        ...

    def sending(self, spec: SyncSpec, push: Push) -> Mapping[str, Any]:
        """Start to send on every rank. Returns: a call for each, by the process's name, that ends in a SendReport."""
        ...


class WeightReceiver(Protocol):
    """The engines, as far as a push needs them."""

    def pause(self) -> None:
        """Stop generating on every engine."""
        ...

    def loading(self, spec: SyncSpec, push: Push) -> Mapping[str, Any]:
        """Start to load on every engine. Returns: a call for each, which ends in the LoadReports of its ranks."""
        ...

    def commit(self, version: int) -> None:
        """Every engine takes the version, and when all have, they generate again."""
        ...


class EngineSync:
    """Satisfies `protocols.WeightSync`."""

    def __init__(
        self,
        sender: WeightSender,
        receiver: WeightReceiver,
        spec: SyncSpec,
        *,
        gather: Callable[[Mapping[str, Any]], Sequence[Any]],
        still_running: Callable[[Mapping[str, Any], float], Sequence[str]],
        verify_every: int = 0,
    ):
        """gather: the results of calls, in order; raises with the first failure, also while others still run.

        still_running: names of the calls that have not ended within so many seconds.
        verify_every: versions that it divides are compared element by element after the load; 0 compares none.
        """
        self._sender = sender
        self._receiver = receiver
        self._spec = spec
        self._gather, self._still_running = gather, still_running
        self._verify_every = verify_every
        self._session: str | None = None
        self._running: dict[str, Any] = {}
        """Calls of which some may not have ended."""

    def push(self, *, version: int) -> dict[str, float]:
        """Pause, and send, load and verify on every rank; only then commit `version` and generate again.

        Raises: SyncError naming the ranks; the engines stay paused, and serve no mixture of versions.
        """
        times = [time.perf_counter()]
        self._end_last()
        self._receiver.pause()
        times.append(time.perf_counter())
        session, self._session = self._session or secrets.token_hex(16), None
        push = Push(self._sender.meeting(), session, version)
        sent, loaded = self._move(push)
        times.append(time.perf_counter())
        if self._verify_every and version % self._verify_every == 0:
            self._move(replace(push, compare=True))
        self._session = session
        times.append(time.perf_counter())
        self._receiver.commit(version)
        times.append(time.perf_counter())
        pause_s, move_s, verify_s, commit_s = (b - a for a, b in zip(times, times[1:], strict=False))
        received = sum(r.received_bytes for r in loaded)
        both: list[SendReport | LoadReport] = [*sent, *loaded]
        logger.info("synced version %d: %.3f GB in %.2f s", version, received / 1e9, times[-1] - times[0])
        compared = sum(r.compared for r in sent)
        changed = {"sync/changed_share": sum(r.changed for r in sent) / compared} if compared else {}
        return {
            **changed,
            "sync/bytes_received": float(received),
            "sync/bytes_needed": float(sum(r.needed_bytes for r in loaded)),
            "sync/staging_bytes": float(max(r.staging_bytes for r in both)),
            "sync/pause_s": pause_s,
            "sync/move_s": move_s,
            "sync/verify_s": verify_s,
            "sync/commit_s": commit_s,
            "sync/pack_s": max(r.pack_s for r in sent),
            "sync/unpack_s": max(r.unpack_s for r in loaded),
            "sync/check_s": max(r.check_s for r in both),
        }

    def _end_last(self) -> None:
        """Wait for what still runs of a push that failed: its ranks would come late to this one.

        Raises: SyncError naming the processes that do not end.
        """
        if late := self._still_running(self._running, LAST_CALLS_S):
            raise SyncError(
                f"{', '.join(late)} did not end the push before, which failed, within {LAST_CALLS_S:.0f} s: stopped or "
                "hanging. The engines stay paused. End the run and resume with the same command."
            )
        self._running = {}

    def _move(self, push: Push) -> tuple[list[SendReport], list[LoadReport]]:
        """Run both sides. Raises: SyncError when a rank got more or less than its parameters hold."""
        sending, loading = self._sender.sending(self._spec, push), self._receiver.loading(self._spec, push)
        self._running = {**sending, **loading}
        reports = self._gather(self._running)
        self._running = {}
        loaded = [report for engine in reports[len(sending) :] for report in engine]
        covered, needed = sum(r.covered_bytes for r in loaded), sum(r.needed_bytes for r in loaded)
        if covered != needed:
            raise SyncError(
                f"The engines' parameters take {needed} bytes and {covered} arrived: the layout table leaves out or "
                "repeats part of a parameter. The engines stay paused."
            )
        return list(reports[: len(sending)]), loaded
