"""What travels between modules: frozen dataclasses. Token arrays stay in `Rollouts`, in the object store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenized, with what its reward needs to judge an answer."""

    id: str
    """Stable across runs: a hash of the source and the text."""
    text: str
    tokens: tuple[int, ...]
    """[prompt_tokens] token ids."""
    answer: str
    """Reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the source's own verifier needs; JSON-serializable."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Generated sequences of one engine request, packed row after row. S rows, N tokens in all.

    Row i holds prompt and response tokens `tokens[offsets[i]:offsets[i+1]]`, of which the first
    `prompt_lengths[i]` are the prompt.
    """

    tokens: np.ndarray
    """int32 [N]."""
    logprobs: np.ndarray
    """float32 [N]: log-probability the engine gave each response token; 0 at prompt positions."""
    offsets: np.ndarray
    """int64 [S + 1]."""
    prompt_lengths: np.ndarray
    """int64 [S]."""

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray, int]:
        """(tokens [L], logprobs [L], prompt length) of row i."""
        a, b = int(self.offsets[i]), int(self.offsets[i + 1])
        return self.tokens[a:b], self.logprobs[a:b], int(self.prompt_lengths[i])


@dataclass(frozen=True, slots=True)
class Sample:
    """What the controller knows of one generated answer: scalars and a reference, never tokens."""

    prompt_id: str
    group: int
    """Index of the prompt within the step; the samples of one group share it."""
    rollouts: Any
    """Reference to the `Rollouts` that holds the tokens (a Ray ObjectRef, or the object itself in tests)."""
    row: int
    """Row within `rollouts`."""
    prompt_tokens: int
    response_tokens: int
    finish: str
    """`stop` or "length"."""
    version: int
    """Weight version that generated every token of it."""
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step, cut into mini-batches (one optimizer step each) and micro-batches.

    Example: `schedule[0][1][2]` lists the samples (indices into `samples`) that data-parallel rank 1 packs into its
    third micro-batch of the first mini-batch. Every rank has the same number of micro-batches in a mini-batch.
    """

    samples: tuple[Sample, ...]
    schedule: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """[mini_batch][dp_rank][micro_batch] -> sample indices."""
    advantages: np.ndarray | None = None
    """float32 [S], one per sample."""
    logprobs: Any = None
    """Per data-parallel rank, a reference to the trainer's log-probabilities of its samples; None when not needed."""
