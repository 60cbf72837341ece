"""What the loop needs of its parts, and nothing else. `run.py` names the classes that satisfy these."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_rl.types import Batch, Prompt, Sample


class Trainer(Protocol):
    """The model being trained, over all its ranks."""

    def begin(self, phase: str) -> None:
        """Start "sft" or "rl" with a fresh optimizer and learning-rate schedule."""
        ...

    def logprobs(self, batch: Batch) -> Batch:
        """Fill `batch.logprobs` with what the recipe needs (old policy, frozen reference)."""
        ...

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns metrics averaged over tokens: loss, grad_norm, kl, entropy, ..."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, optimizer, scheduler and RNG of every rank below `directory`."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        ...


class Engine(Protocol):
    """The rollout engines."""

    def generate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> list[Sample]:
        """Sample answers; group i holds `samples_per_prompt` samples of prompts[i]."""
        ...


class WeightSync(Protocol):
    """Carries the trainer's weights into every engine."""

    def push(self, *, version: int) -> dict[str, float]:
        """Pause generation, replace every engine weight, commit `version`, resume. Returns sync/* metrics."""
        ...


class Reward(Protocol):
    """Judges samples."""

    def __call__(
        self, samples: list[Sample], prompts: Sequence[Prompt], *, step: int, split: str = "train"
    ) -> list[Sample]:
        """The same samples, in order, with `reward` set. split: "train" or "eval"."""
        ...

    def drop(self, *, from_step: int) -> None:
        """Forget the recorded samples of `from_step` and later: they are made again."""
        ...
