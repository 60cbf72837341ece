"""The driver's handle on the trainer: one actor a rank, every call on all of them, with a deadline."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megatron_rl.algorithms.recipes import RECIPES
from megatron_rl.cluster import gather, let_end
from megatron_rl.config import Config
from megatron_rl.pools import Pool
from megatron_rl.resharding.spec import Push, SyncSpec
from megatron_rl.trainer.rank_batch import split
from megatron_rl.trainer.worker import Worker
from megatron_rl.types import Batch

STOP_TIMEOUT_S = 10.0


class MegatronTrainer:
    """Satisfies `protocols.Trainer` and `sync.WeightSender`."""

    worker: type[Worker] = Worker
    """What each actor runs; tools/bench_step.py times more than it does."""

    def __init__(self, config: Config, model_directory: Path, *, pool: Pool, logs: Path):
        """Start `config.trainer.world_size` ranks in `pool`, which read the weights; `ready` waits for them.

        Rank i logs to `logs`/trainer-i.log.
        """
        self._config, self._logs = config, logs
        self.nodes = pool.nodes()
        """Of each rank."""
        self._actors = [
            pool.spawn(self.worker, config, rank, str(model_directory), index=rank, log=logs / f"{_name(rank)}.log")
            for rank in range(config.trainer.world_size)
        ]
        self._meeting = self._actors[0].address.remote()
        self.starting = {_name(rank): actor.build.remote(self._meeting) for rank, actor in enumerate(self._actors)}
        """What each process's start will answer, by its name."""
        self._dp_of_rank: list[int] = []

    def ready(self) -> None:
        """Wait until every rank has its weights.

        Raises: ConfigError, LayoutError, DataError, BackendError as the ranks do.
        """
        start_s = self._config.trainer.start_timeout_s
        self._dp_of_rank = gather(self.starting, what="Starting the trainer", timeout_s=start_s, logs=self._logs)

    def begin(self, phase: str) -> None:
        """Start "sft" or "rl" with a fresh optimizer and schedule; "rl" may freeze the weights as its reference."""
        self._call("begin", phase, what=f"Starting phase {phase}")

    def logprobs(self, batch: Batch) -> Batch:
        """Old log-probabilities when there are several mini-batches, the reference's when the recipe has one."""
        algorithm = self._config.algorithm
        if algorithm.mini_batches == 1 and not RECIPES[algorithm.recipe].needs_reference(algorithm):
            return batch
        answers = self._each("logprobs", self._parts(batch), what="Log-probabilities")
        found = {dp: a for dp, a in zip(self._dp_of_rank, answers, strict=True) if a is not None}
        return replace(batch, logprobs=tuple(found[dp] for dp in sorted(found)))

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns metrics per token (loss, entropy, kl, ...), grad_norm, lr, tokens.

        Raises: BackendError when a loss or gradient is not finite, with the weights as before that step.
        """
        return self._each("update", self._parts(batch), what="Update")[-1]  # the last rank is on the last stage

    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule and random state of every rank below `directory`, which exists."""
        self._call("save", str(directory), what="Saving the trainer")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, phase and reference included."""
        self._call("load", str(directory), what="Loading the trainer")

    def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face checkpoint into `directory`, made when missing."""
        directory.mkdir(parents=True, exist_ok=True)
        self._call("export", str(directory), what="Exporting the weights")

    def meeting(self) -> str:
        """host:port of the TCPStore that rank 0 keeps."""
        address: str = ray.get(self._meeting)
        return address.removeprefix("tcp://")

    def sending(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        """Start to send on every rank; each call ends in a SendReport."""
        return {_name(rank): actor.send_weights.remote(spec, push) for rank, actor in enumerate(self._actors)}

    def stop(self) -> None:
        """Let the ranks free what outlives them, and end them; also when some are dead already."""
        let_end([actor.close.remote() for actor in self._actors], timeout_s=STOP_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor)

    def _parts(self, batch: Batch) -> list[Any]:
        """For each rank a reference to its data-parallel rank's part."""
        parts = [ray.put(part) for part in split(batch, max(self._dp_of_rank) + 1)]
        return [parts[dp] for dp in self._dp_of_rank]

    def _call(self, method: str, *args: Any, what: str) -> list[Any]:
        return self._each(method, [args] * len(self._actors), what=what, spread=True)

    def _each(self, method: str, args: Sequence[Any], *, what: str, spread: bool = False) -> list[Any]:
        """Call a method on every rank, rank i with args[i], a tuple of arguments if `spread`."""
        calls = {
            _name(rank): getattr(actor, method).remote(*(one if spread else (one,)))
            for rank, (actor, one) in enumerate(zip(self._actors, args, strict=True))
        }
        return gather(calls, what=what, timeout_s=self._config.trainer.step_timeout_s, logs=self._logs)


def _name(rank: int) -> str:
    return f"trainer-{rank}"
