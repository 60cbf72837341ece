"""Recorded samples in place of engines: mode=train_only trains on a samples.jsonl exactly as the run that wrote it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import DataError
from megatron_rl.rollout.samples import read_samples
from megatron_rl.types import Prompt, Sample


class Replay:
    """Satisfies `protocols.Engine`, `Reward` (rewards are recorded too) and `WeightSync` (there is no engine)."""

    def __init__(self, path: Path):
        """Raises: DataError when the file is not what a run recorded."""
        self._path = path
        self._steps: dict[tuple[str, ...], list[Sample]] = {}
        for step, samples in read_samples(path):
            _check_groups(samples, f"{path} step {step}")
            self._steps[_key([s.prompt_id for s in samples])] = samples
        if not self._steps:
            raise DataError(f"samples={path} holds no training sample. Name a samples.jsonl of a run with steps > 0.")

    def generate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> list[Sample]:
        """The samples that were recorded for these prompts.

        Raises: DataError when no recorded step had them, or had another number of samples of each.
        """
        samples = self._steps.get(_key([p.id for p in prompts]))
        if samples is None:
            raise DataError(
                f"None of the {len(self._steps)} steps recorded in {self._path} has the prompts of this step: the file "
                "is at its end, or was written with other data.*, prompts_per_step or sft.* settings. Use those of the "
                "run that wrote it, and at most its steps."
            )
        if len(samples) != samples_per_prompt * len(prompts):
            raise DataError(
                f"{self._path} has {len(samples)} samples for {len(prompts)} prompts. Set sampling.samples_per_prompt="
                f"{len(samples) // len(prompts)}, as in the run that wrote it."
            )
        return samples

    def __call__(
        self, samples: list[Sample], prompts: Sequence[Prompt], *, step: int, split: str = "train"
    ) -> list[Sample]:
        """The samples as they are."""
        return samples

    def drop(self, *, from_step: int) -> None:
        """Nothing is recorded."""

    def push(self, *, version: int) -> dict[str, float]:
        """Nothing to send to."""
        return {}


def _check_groups(samples: Sequence[Sample], where: str) -> None:
    """A run records whole groups, all of one size."""
    sizes = Counter(s.group for s in samples)
    smallest, largest = min(sizes, key=lambda g: sizes[g]), max(sizes, key=lambda g: sizes[g])
    if sizes[smallest] != sizes[largest]:
        raise DataError(
            f"{where}: group {smallest} has {sizes[smallest]} sample(s) and group {largest} has {sizes[largest]}: "
            "lines were lost or added. Use the file as the run wrote it, or remove that step and those after it."
        )


def _key(prompt_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(prompt_ids))
