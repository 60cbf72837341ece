"""Judges samples where their tokens are: an actor decodes the responses, applies the reward, records them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megatron_rl.cluster import gather
from megatron_rl.config import RewardConfig
from megatron_rl.pools import Pool
from megatron_rl.rewards import load_reward
from megatron_rl.rollout.samples import append_samples, drop_samples
from megatron_rl.types import Prompt, Rollouts, Sample

TIMEOUT_S = 1800.0
NAME = "scorer"
_LATE = "a reward function that hangs on a response needs a time limit of its own, or it hangs there again"


class Scorer:
    """The actor."""

    def __init__(self, reward: RewardConfig, tokenizer_directory: str, samples_path: str):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
        self._reward = load_reward(reward.name, threshold=reward.threshold)
        self._path = Path(samples_path)

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], step: int, split: str) -> list[float]:
        """Rewards, in order; the samples are on disk when it returns."""
        rollouts = _fetch([s.rollouts for s in samples])
        responses = []
        for sample, rows in zip(samples, rollouts, strict=True):
            tokens, _, length = rows.row(sample.row)
            responses.append(tokens[length:].tolist())
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = [self._reward(text, prompts[s.group]) for s, text in zip(samples, texts, strict=True)]
        judged = [replace(s, reward=r) for s, r in zip(samples, rewards, strict=True)]
        append_samples(self._path, judged, prompts, texts, rollouts, step=step, split=split)
        return rewards

    def drop(self, from_step: int) -> None:
        """Forget recorded samples of `from_step` and later, which a resumed run will make again."""
        drop_samples(self._path, from_step=from_step)


class Scoring:
    """The driver's handle; satisfies `protocols.Reward`."""

    def __init__(self, reward: RewardConfig, tokenizer_directory: Path, samples_path: Path, *, pool: Pool, logs: Path):
        """Start the scorer in `pool`. Raises: ConfigError for an unknown reward, with the first call."""
        self._logs = logs
        arguments = (reward, str(tokenizer_directory), str(samples_path))
        self._scorer = pool.spawn(Scorer, *arguments, index=0, log=logs / f"{NAME}.log")

    def __call__(
        self, samples: list[Sample], prompts: Sequence[Prompt], *, step: int, split: str = "train"
    ) -> list[Sample]:
        """The same samples, in order, with `reward` set. Only samples of split "train" are ever replayed."""
        rewards = self._call("score", samples, prompts, step, split, what="Judging samples")
        return [replace(s, reward=r) for s, r in zip(samples, rewards, strict=True)]

    def drop(self, *, from_step: int) -> None:
        """Forget recorded samples of `from_step` and later."""
        self._call("drop", from_step, what="Trimming samples.jsonl")

    def _call(self, method: str, *args: Any, what: str) -> Any:
        calls = {NAME: getattr(self._scorer, method).remote(*args)}
        return gather(calls, what=what, timeout_s=TIMEOUT_S, logs=self._logs, late=_LATE)[0]


def _fetch(references: Sequence[Any]) -> list[Rollouts]:
    """The rollouts behind references, each fetched once; what is no reference is itself."""
    distinct = list(dict.fromkeys(r for r in references if not isinstance(r, Rollouts)))
    found = dict(zip(distinct, ray.get(distinct), strict=True)) if distinct else {}
    return [r if isinstance(r, Rollouts) else found[r] for r in references]
