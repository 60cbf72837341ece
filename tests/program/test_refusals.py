"""What cannot work is refused by the program itself, with the mend, before Ray starts."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program.conftest import World
from tests.program.program import DONE, REFUSED, finish, running

LIMIT_S = 5.0
"""README's promise for a config. Counted in processor time: a busy machine is not the program's fault."""

Check = Callable[..., None]


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"algorithm__learning_rate": 1}, r"Unknown config key 'algorithm\.learning_rate'.*nothing reads it"),
        ({"+sampling__max_token": 5}, r"'sampling\.max_token'.*Did you mean 'sampling\.max_tokens'"),
        ({"steps": "many"}, r"steps: Value 'many'"),
        ({"parallel__tp": 3, "parallel__sp": True}, r"world_size=2 is not a multiple of parallel\.tp=3.*Set"),
        ({"rollout__tp": 3}, r"rollout\.tp=3 does not divide"),
        ({"rollout__sglang__chunked_prefil_size": 8}, r"Did you mean 'chunked_prefill_size'"),
        ({"rollout__sglang__port": 30000}, r"rollout\.sglang\.port is set by the rollout itself"),
        ({"trainer__megatron__moe_aux_los_coeff": 1}, r"Did you mean 'moe_aux_loss_coeff'"),
        ({"model__path": "/nowhere"}, r"/nowhere has no readable config\.json.*Set model\.path"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_work_is_refused_within_five_seconds(
    world: World, changes: dict[str, object], pattern: str
) -> None:
    ended = finish(world.arguments("refused", **changes), world.output("refused"))

    ended.said(pattern, code=REFUSED)
    assert "starting" not in ended.text
    assert ended.cpu_s < LIMIT_S
    assert not (world.runs / "refused").exists()


def test_a_run_that_somebody_saw_end_can_still_be_asked_how(tmp_path: Path) -> None:
    """A signal to it looks first whether it lives, for example."""
    with running(["--help"], tmp_path / "help.out") as run:
        assert run.process.wait() == DONE

        ended = run.end()

    assert (ended.code, ended.left_behind) == (DONE, ())
    assert ended.text.startswith("usage: ")


def test_a_model_directory_without_weights_is_refused(world: World, ends_as: Check, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((world.model / "config.json").read_text())

    pattern = r"no weights, neither \*\.safetensors nor what tools/convert writes.*Set model\.path"
    ends_as(pattern, REFUSED, "no-weights", model__path=tmp_path)


def test_a_missing_prompt_file_is_named(ends_as: Check, tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"

    ends_as(rf"data\.path={missing} cannot be read.*Set data\.path", REFUSED, "no-prompts", data__path=missing)


def test_a_malformed_prompt_is_named_by_its_line(world: World, ends_as: Check, tmp_path: Path) -> None:
    lines = world.prompts.read_text().splitlines()
    lines[16] = lines[16][:-3]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(lines))

    ends_as(r"broken\.jsonl line 17 is not JSON", REFUSED, "line-17", data__path=broken)


def test_a_prompt_longer_than_the_context_is_named(world: World, ends_as: Check, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(world.prompts.read_text() + json.dumps({"prompt": "7" * 2000, "answer": "7"}) + "\n")

    ends_as(r"long\.jsonl line 101\) has 2000 tokens, more than the \d+ .*Shorten", REFUSED, "long", data__path=long)


RECORD = {
    "step": 1, "split": "train", "group": 0, "prompt_id": "a", "reward": 1.0, "version": 0, "finish": "stop",
    "prompt_tokens": [3, 4], "response_tokens": [5, 1], "logprobs": [-0.5, -0.25],
}  # fmt: skip


def test_a_garbled_recorded_sample_is_named_by_its_line(ends_as: Check, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps(RECORD) + "\n" + json.dumps(RECORD)[:40] + "\n")

    ends_as(r"samples\.jsonl line 2 is not a recorded sample", REFUSED, "garbled", mode="train_only", samples=samples)


def test_a_group_cut_to_one_sample_is_named(ends_as: Check, tmp_path: Path) -> None:
    records = [RECORD, *({**RECORD, "group": 1, "prompt_id": "b"} for _ in range(4))]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps(r) + "\n" for r in records))

    ends_as(r"step 1: group 0 has 1 sample\(s\) and group 1 has 4", REFUSED, "cut", mode="train_only", samples=samples)


def test_two_runs_in_one_directory_are_refused(world: World, ends_as: Check) -> None:
    directory = world.runs / "busy"
    directory.mkdir()
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        ends_as(r"Another process is running in .*busy.*Choose another name", REFUSED, "busy")

    assert [p.name for p in directory.iterdir()] in ([".lock"], ["log", ".lock"], [".lock", "log"])
