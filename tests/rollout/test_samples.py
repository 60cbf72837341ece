"""samples.jsonl: what is written comes back bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from megatron_rl.errors import BackendError, DataError
from megatron_rl.rollout.fleet import sample_seed
from megatron_rl.rollout.samples import append_samples, drop_samples, read_samples
from megatron_rl.rollout.server import _pack
from megatron_rl.types import Prompt, Rollouts, Sample

PROMPTS = [
    Prompt(id="a", text="zwei plus drei?", tokens=(5, 6, 7), answer="fünf"),
    Prompt(id="b", text='quote " and\nnewline', tokens=(8,), answer=""),
]
ROLLOUTS = Rollouts(
    tokens=np.array([5, 6, 7, 20, 21, 8, 22], dtype=np.int32),
    logprobs=np.array([0, 0, 0, -0.1, -1e-30, 0, -12.345678], dtype=np.float32),
    offsets=np.array([0, 5, 7]),
    prompt_lengths=np.array([3, 1]),
)
SAMPLES = [
    Sample("a", 0, ROLLOUTS, 0, 3, 2, "stop", 4, 1.0),
    Sample("b", 1, ROLLOUTS, 1, 1, 1, "length", 4, 0.25),
]


def write(path: Path, *, step: int, split: str = "train") -> None:
    append_samples(path, SAMPLES, PROMPTS, ["fünf", "x"], [ROLLOUTS, ROLLOUTS], step=step, split=split)


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, step=1)
    write(path, step=2)

    (first, one), (second, _) = read_samples(path)

    assert (first, second) == (1, 2)
    assert [(s.prompt_id, s.group, s.row, s.prompt_tokens, s.response_tokens) for s in one] == [
        ("a", 0, 0, 3, 2),
        ("b", 1, 1, 1, 1),
    ]
    assert [(s.finish, s.version, s.reward) for s in one] == [("stop", 4, 1.0), ("length", 4, 0.25)]
    for name in ("tokens", "logprobs", "offsets", "prompt_lengths"):
        got, want = getattr(one[0].rollouts, name), getattr(ROLLOUTS, name)
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes(), name


def test_evaluation_samples_are_recorded_and_never_replayed(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, step=0, split="eval")
    write(path, step=1)
    write(path, step=1, split="eval")

    assert len(path.read_text().splitlines()) == 6
    assert [step for step, _ in read_samples(path)] == [1]


def test_dropping_cuts_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step in (1, 2, 3):
        write(path, step=step)
    whole = path.read_bytes()
    two_steps = b"".join(whole.splitlines(keepends=True)[:4])

    path.write_bytes(whole + whole[:50])
    drop_samples(path, from_step=9)
    assert path.read_bytes() == whole
    drop_samples(path, from_step=3)
    assert path.read_bytes() == two_steps
    drop_samples(tmp_path / "none.jsonl", from_step=1)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_line_that_is_no_sample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, step=1)
    with path.open("a") as file:
        file.write('{"step": 2}\n')

    with pytest.raises(DataError, match="line 3 is not a recorded sample.*split"):
        list(read_samples(path))


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("[-12.345678]", "[NaN]"),
        ("[-12.345678]", "[-Infinity]"),
        ("[-12.345678]", "[null]"),
        ("[-12.345678]", "[-1e39]"),
        ("[-12.345678]", "[]"),
        ("[-12.345678]", "[-1.0, -1.0]"),
        ('"reward": 0.25', '"reward": NaN'),
        ('"reward": 0.25', '"reward": null'),
    ],
)
def test_a_number_that_no_run_records_is_refused_with_its_line(tmp_path: Path, sound: str, broken: str) -> None:
    """Training on it goes on: the metrics of the step are null, and its update is not what the samples are worth."""
    path = tmp_path / "samples.jsonl"
    write(path, step=1)
    text = path.read_text()
    assert text.count(sound) == 1
    path.write_text(text.replace(sound, broken))

    with pytest.raises(DataError, match=r"line 2 is not a recorded sample.*(finite number|of 1 response tokens)"):
        list(read_samples(path))


def test_every_sample_has_a_seed_of_its_own_that_sglang_accepts() -> None:
    seeds = {sample_seed(s, g, i) for s in range(4) for g in range(16) for i in range(8)}

    assert len(seeds) == 4 * 16 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("value", [None, float("-inf")])
def test_an_engine_whose_logits_are_no_numbers_is_named_as_that(value: float | None) -> None:
    """SGLang answers in JSON, which has null for NaN."""
    sound = {"output_ids": [5], "meta_info": {"output_token_logprobs": [[-0.5, 5, None]]}}
    broken = {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": [[-0.5, 5, None], [value, 6, None]]}}

    assert _pack([[1, 2]], [sound]).logprobs.tolist() == [0, 0, -0.5]
    with pytest.raises(BackendError, match=r"1 sampled token\(s\) the log-probability (NaN|-inf): .*diverged"):
        _pack([[1, 2], [3]], [sound, broken])
