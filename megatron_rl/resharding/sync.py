"""One push of the trainer's weights into every engine, from pause to commit. The driver moves addresses only."""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.errors import SyncError
from megatron_rl.resharding.spec import Bucket, LoadReport, SyncSpec

logger = logging.getLogger(__name__)


class WeightSender(Protocol):
    """The trainer, as far as a push needs it."""

    def send_weights(self, spec: SyncSpec) -> Sequence[Bucket]:
        """Every rank packs what the engines' ranks need; the buckets of all ranks."""
        ...


class WeightReceiver(Protocol):
    """The engines, as far as a push needs them."""

    def pause(self) -> None:
        """Stop generating on every engine."""
        ...

    def load_weights(self, spec: SyncSpec, buckets: Sequence[Bucket], *, verify: bool) -> list[list[LoadReport]]:
        """Every engine replaces its weights, and with `verify` compares them with what was sent; [engine][rank]."""
        ...

    def commit(self, version: int) -> None:
        """Every engine takes the version and generates again."""
        ...


class EngineSync:
    """Satisfies `protocols.WeightSync`."""

    def __init__(self, sender: WeightSender, receiver: WeightReceiver, spec: SyncSpec, *, verify_every: int = 0):
        """verify_every: versions that it divides are compared element by element after the load; 0 compares none."""
        self._sender = sender
        self._receiver = receiver
        self._spec = spec
        self._verify_every = verify_every

    def push(self, *, version: int) -> dict[str, float]:
        """Pause, pack, load and verify on every rank of every engine; only then commit `version` and generate again.

        Raises: SyncError naming engine and rank; the engines stay paused, and serve no mixture of versions.
        """
        times = [time.perf_counter()]
        self._receiver.pause()
        times.append(time.perf_counter())
        buckets = self._sender.send_weights(self._spec)
        times.append(time.perf_counter())
        verify = self._verify_every > 0 and version % self._verify_every == 0
        engines = self._receiver.load_weights(self._spec, buckets, verify=verify)
        reports = [report for engine in engines for report in engine]
        times.append(time.perf_counter())
        received, needed = sum(r.received_bytes for r in reports), sum(r.needed_bytes for r in reports)
        if received != needed:
            raise SyncError(
                f"The engines' parameters take {needed} bytes and {received} arrived: the layout table leaves out or "
                "repeats part of a parameter. The engines stay paused."
            )
        self._receiver.commit(version)
        times.append(time.perf_counter())
        pause_s, pack_s, load_s, commit_s = (b - a for a, b in zip(times, times[1:], strict=False))
        logger.info("synced version %d: %.3f GB in %.2f s", version, received / 1e9, times[-1] - times[0])
        return {
            "sync/bytes_received": float(received),
            "sync/bytes_needed": float(needed),
            "sync/pause_s": pause_s,
            "sync/pack_s": pack_s,
            "sync/load_s": load_s,
            "sync/commit_s": commit_s,
        }
