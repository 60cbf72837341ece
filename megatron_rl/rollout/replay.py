"""Recorded samples in place of engines: mode=train_only trains on a samples.jsonl exactly as the run that wrote it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import DataError
from megatron_rl.rollout.samples import read_samples
from megatron_rl.types import Prompt, Sample


class Replay:
    """Satisfies `protocols.Engine`, `Reward` (rewards are recorded too) and `WeightSync` (there is no engine)."""

    def __init__(self, path: Path, *, vocab_size: int, steps: int):
        """Raises: DataError when the file is not what a run recorded, of a model with a larger vocabulary, or without
        the last of `steps`."""
        self._path = path
        self._steps: dict[int, list[Sample]] = {}
        self._version = 0
        for step, samples in read_samples(path):
            _check_groups(samples, f"{path} step {step}")
            if step in self._steps:
                raise DataError(f"{path} has step {step} in two places. Use the file as the run wrote it.")
            if (largest := int(samples[0].rollouts.tokens.max())) >= vocab_size:
                raise DataError(
                    f"{path} step {step} has token {largest}, and the model's vocabulary ends at {vocab_size - 1}: "
                    "another model sampled it. Use the model of the run that wrote it."
                )
            self._steps[step] = samples
        if not self._steps:
            raise DataError(f"samples={path} holds no training sample. Name a samples.jsonl of a run with steps > 0.")
        if steps:
            self._recorded(steps)

    def generate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> list[Sample]:
        """The samples that were recorded at the step after the version that was pushed last.

        Raises: DataError when there are none, or they are of other prompts, or another number of each.
        """
        step = self._version + 1
        samples = self._recorded(step)
        if list({s.group: s.prompt_id for s in samples}.values()) != [p.id for p in prompts]:
            raise DataError(
                f"{self._path} was written with other prompts at step {step}: other data.*, prompts_per_step or sft.* "
                "settings. Use those of the run that wrote it."
            )
        if len(samples) != samples_per_prompt * len(prompts):
            raise DataError(
                f"{self._path} has {len(samples)} samples for {len(prompts)} prompts. Set sampling.samples_per_prompt="
                f"{len(samples) // len(prompts)}, as in the run that wrote it."
            )
        return samples

    def _recorded(self, step: int) -> list[Sample]:
        if step not in self._steps:
            raise DataError(
                f"{self._path} has no sample of step {step}: it holds {len(self._steps)} steps, {min(self._steps)} to "
                f"{max(self._steps)}. Set steps to at most the last of them."
            )
        return self._steps[step]

    def __call__(
        self, samples: list[Sample], prompts: Sequence[Prompt], *, step: int, split: str = "train"
    ) -> list[Sample]:
        """The samples as they are."""
        return samples

    def drop(self, *, from_step: int) -> None:
        """Nothing is recorded."""

    def push(self, *, version: int) -> dict[str, float]:
        """Nothing to send to."""
        self._version = version
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
