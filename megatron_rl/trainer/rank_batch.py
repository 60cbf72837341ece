"""What one data-parallel rank gets of a batch, and the rows its micro-batches are packed from."""

# S samples of this data-parallel rank, N their response tokens

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from megatron_rl.trainer.micro_batch import Row
from megatron_rl.types import Batch, Rollouts


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The samples of one data-parallel rank, in the order of its micro-batches."""

    schedule: tuple[tuple[int, ...], ...]
    """[mini_batch][micro_batch] -> number of samples."""
    rollouts: tuple[Any, ...]
    """Distinct rollouts, or Ray references to them."""
    places: np.ndarray
    """int64 [S, 2]: which of `rollouts`, and the row in it."""
    advantages: np.ndarray | None
    """float32 [S]; None for supervised training."""
    logprobs: Any
    """`Logprobs` of these samples, or a Ray reference to it; None when not needed."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The trainer's own log-probabilities of all response tokens of a `RankBatch`, in its order."""

    old: np.ndarray | None
    """float32 [N]: before the first optimizer step of the batch."""
    reference: np.ndarray | None
    """float32 [N]: under the frozen reference."""


def split(batch: Batch, dp: int) -> list[RankBatch]:
    """What each data-parallel rank gets: references to its own samples' tokens, and their advantages."""
    out = []
    for rank in range(dp):
        micro_batches = [mini[rank] for mini in batch.schedule]
        chosen = [i for mini in micro_batches for micro in mini for i in micro]
        slots: dict[Any, int] = {}
        distinct: list[Any] = []
        places: list[tuple[int, int]] = []
        for i in chosen:
            rollouts = batch.samples[i].rollouts
            # A Ray reference is equal to its copies; rollouts themselves are told apart by identity.
            slot = slots.setdefault(rollouts if isinstance(rollouts, ray.ObjectRef) else id(rollouts), len(slots))
            if slot == len(distinct):
                distinct.append(rollouts)
            places.append((slot, batch.samples[i].row))
        out.append(
            RankBatch(
                schedule=tuple(tuple(len(micro) for micro in mini) for mini in micro_batches),
                rollouts=tuple(distinct),
                places=np.array(places, np.int64).reshape(-1, 2),
                advantages=None if batch.advantages is None else batch.advantages[chosen],
                logprobs=None if batch.logprobs is None else batch.logprobs[rank],
            )
        )
    return out


def micro_batches(batch: RankBatch) -> Iterator[list[list[Row]]]:
    """For each mini-batch the rows of its micro-batches. Fetches tokens from the object store."""
    rollouts: Sequence[Rollouts] = fetch(batch.rollouts)
    (logprobs,) = fetch((batch.logprobs,))
    known = {"old": logprobs.old, "reference": logprobs.reference} if logprobs else {}
    sample = done = 0
    for mini in batch.schedule:
        out = []
        for size in mini:
            rows = []
            for i in range(sample, sample + size):
                slot, place = batch.places[i]
                tokens, sampled, prompt_length = rollouts[slot].row(int(place))
                n = len(tokens) - prompt_length
                values = {name: v[done : done + n] for name, v in known.items() if v is not None}
                advantage = 0.0 if batch.advantages is None else batch.advantages[i]
                values |= {"rollout": sampled[prompt_length:], "advantages": np.full(n, advantage, np.float32)}
                rows.append(Row(tokens, prompt_length, values))
                done += n
            sample += size
            out.append(rows)
        yield out


def fetch(values: Sequence[Any]) -> list[Any]:
    """Replace Ray references by what they refer to, in one wait."""
    references = [v for v in values if isinstance(v, ray.ObjectRef)]
    found = iter(ray.get(references) if references else [])
    return [next(found) if isinstance(v, ray.ObjectRef) else v for v in values]


def store(value: Any) -> Any:
    """Put a value in Ray's object store and return the reference; without Ray, return the value."""
    return ray.put(value) if ray.is_initialized() else value
