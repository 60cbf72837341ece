"""mode=train_only: each step gets the samples that were recorded at that step."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.errors import DataError
from megatron_rl.rollout.replay import Replay
from megatron_rl.rollout.samples import append_samples
from megatron_rl.types import Prompt, Sample
from tests.rollout.test_samples import PROMPTS, ROLLOUTS

ONE = PROMPTS[:1]
VOCAB = 23
"""One more than the largest token recorded."""


def recorded(path: Path, steps: dict[int, list[Prompt]], *, each: int = 2) -> Path:
    """`each` samples of every step's prompts, whose reward is the step."""
    for step, prompts in steps.items():
        samples = [
            Sample(p.id, g, ROLLOUTS, 0, 3, 2, "stop", step - 1, float(step))
            for g, p in enumerate(prompts)
            for _ in range(each)
        ]
        n = len(samples)
        append_samples(path, samples, prompts, ["x"] * n, [ROLLOUTS] * n, step=step, split="train")
    return path


def opened(directory: Path, steps: dict[int, list[Prompt]]) -> Replay:
    return Replay(recorded(directory / "s.jsonl", steps), vocab_size=VOCAB, steps=max(steps))


def rewards(replay: Replay, prompts: list[Prompt], *, step: int) -> list[float | None]:
    replay.push(version=step - 1)
    return [s.reward for s in replay.generate(prompts, samples_per_prompt=2, seed=0)]


def test_steps_with_the_same_prompts_are_told_apart(tmp_path: Path) -> None:
    """Of a data set of one prompt every step has the same."""
    replay = opened(tmp_path, dict.fromkeys((1, 2, 3), ONE))

    assert [rewards(replay, ONE, step=step) for step in (1, 2, 3)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert rewards(replay, ONE, step=2) == [2.0, 2.0]  # a run resumed after step 1


def test_a_prompt_that_comes_twice_in_a_step_has_two_groups(tmp_path: Path) -> None:
    """Of a step that takes more prompts than there are."""
    twice = [*PROMPTS, PROMPTS[0]]

    assert rewards(opened(tmp_path, {1: twice}), twice, step=1) == [1.0] * 6


def test_what_was_not_recorded_is_refused(tmp_path: Path) -> None:
    replay = opened(tmp_path, {1: PROMPTS, 2: PROMPTS})

    with pytest.raises(DataError, match="no sample of step 3: it holds 2 steps, 1 to 2"):
        rewards(replay, PROMPTS, step=3)
    with pytest.raises(DataError, match="no sample of step 7: .*Set steps to at most"):
        Replay(tmp_path / "s.jsonl", vocab_size=VOCAB, steps=7)
    for other in (PROMPTS[::-1], ONE, [*ONE, replace(PROMPTS[1], id="c")]):
        with pytest.raises(DataError, match="other prompts at step 2"):
            rewards(replay, other, step=2)
    with pytest.raises(DataError, match="Set sampling.samples_per_prompt=2"):
        replay.generate(PROMPTS, samples_per_prompt=4, seed=0)


def test_a_step_in_two_places_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    for step in (1, 2, 1):
        recorded(path, {step: ONE})

    with pytest.raises(DataError, match="has step 1 in two places"):
        Replay(path, vocab_size=VOCAB, steps=2)


def test_samples_of_a_model_with_more_tokens_are_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "s.jsonl", {1: ONE, 2: PROMPTS})

    with pytest.raises(DataError, match="step 1 has token 21, and the model's vocabulary ends at 20: another model"):
        Replay(path, vocab_size=21, steps=2)
