"""mode=train to its end: what lies in the run directory, and that it belongs together."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.program.conftest import STEPS, Finished, World
from tests.program.states import records, samples

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]

KEYS = {
    "step", "reward/mean", "loss", "grad_norm", "kl", "entropy", "mismatch/logprob_abs_diff_mean",
    "time/generate_s", "time/reward_s", "time/logprobs_s", "time/update_s", "time/sync_s", "time/step_s",
    "throughput/tokens_per_s", "sync/bytes_received", "sync/bytes_needed", "rss/max_bytes",
}  # fmt: skip


def test_a_run_ends_well_and_says_where_its_results_lie(trained: Finished) -> None:
    ended, path = trained.ended, trained.path

    assert ended.left_behind == ()
    assert "Traceback" not in ended.text
    for place in ("metrics.jsonl", "reward.png", "samples.jsonl", "checkpoints", "hf", "log"):
        assert str(path / place) in ended.text
        assert (path / place).exists()


def test_every_step_has_one_record_with_every_promised_key(trained: Finished) -> None:
    lines = [json.loads(line) for line in (trained.path / "metrics.jsonl").read_text().splitlines()]

    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    for line in lines[1:]:
        assert KEYS - line.keys() == set(), line
        assert all(value is not None for value in line.values()), line
        assert line["sync/bytes_received"] == line["sync/bytes_needed"] > 0
        assert line["mismatch/logprob_abs_diff_mean"] <= 1e-4  # float32 on both sides
    assert all("eval/reward" in line for line in (lines[0], lines[-1]))


def test_the_policy_trains(trained: Finished) -> None:
    lines = records(trained.path)[1:]

    assert any(line["reward/mean"] > 0 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines if 0 < line["reward/mean"] < 1)
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)  # the reference is where the policy starts
    assert lines[-1]["kl"] > 0


def test_every_sample_is_recorded_once_with_its_version(trained: Finished, world: World) -> None:
    lines = samples(trained.path)
    answers = {q["prompt"]: q["answer"] for q in map(json.loads, world.prompts.read_text().splitlines())}

    for step in range(1, STEPS + 1):
        group = [line for line in lines if line["step"] == step and line["split"] == "train"]
        assert len(group) == 8 * 4
        assert {line["version"] for line in group} == {step - 1}
    assert sum(line["split"] == "eval" for line in lines) == 2 * 8
    assert all(line["reward"] == float(line["response"].strip() == answers[line["prompt"]]) for line in lines)


def test_the_mean_reward_is_that_of_the_recorded_samples(trained: Finished) -> None:
    for line in records(trained.path)[1:]:
        rewards = [s["reward"] for s in samples(trained.path) if (s["step"], s["split"]) == (line["step"], "train")]
        assert line["reward/mean"] == pytest.approx(np.mean(rewards))


def test_the_resolved_config_is_saved(trained: Finished) -> None:
    saved = yaml.safe_load((trained.path / "config.yaml").read_text())

    assert saved["steps"] == STEPS
    assert saved["algorithm"]["clip_low"] == 0.2  # a default, written out


def test_every_process_has_its_log(trained: Finished) -> None:
    names = {path.name for path in (trained.path / "log").iterdir()}

    assert names >= {"driver.log", "engine-0.log", "scorer.log", "trainer-0.log", "trainer-1.log"}


def test_tensorboard_has_every_step(trained: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.path / "tensorboard"))
    events.Reload()

    assert [event.step for event in events.Scalars("reward/mean")] == list(range(1, STEPS + 1))
    assert [event.step for event in events.Scalars("eval/reward")] == [0, STEPS]


def test_the_reward_curve_is_a_picture(trained: Finished) -> None:
    assert (trained.path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_export_loads_in_transformers_and_is_what_the_engine_sampled_from(trained: Finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained.path / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained.path / "hf")
    last = [line for line in samples(trained.path) if line["version"] == STEPS]
    assert len(last) == 8  # the final evaluation

    for line in last:
        tokens = torch.tensor([line["prompt_tokens"] + line["response_tokens"]])
        assert tokenizer.decode(line["prompt_tokens"]) == line["prompt"]
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        start = len(line["prompt_tokens"])
        found = logprobs[start - 1 :].gather(1, tokens[0, start:, None])[:, 0]
        # Two float32 implementations of one model; a step of the optimizer changes these by 1e-2.
        assert torch.allclose(found, torch.tensor(line["logprobs"]), atol=2e-5, rtol=0)


def test_a_finished_run_started_again_says_so_and_changes_nothing(trained: Finished, world: World) -> None:
    from tests.program.program import DONE, finish

    before = {p: p.stat().st_mtime_ns for p in _results(trained.path)}

    ended = finish(world.arguments("trained"), world.output("again"))

    assert ended.code == DONE, ended.text
    assert "was complete already" in ended.text
    assert {p: p.stat().st_mtime_ns for p in _results(trained.path)} == before


def _results(run: Path) -> list[Path]:
    return [p for part in ("checkpoints", "hf") for p in sorted((run / part).rglob("*"))] + [
        run / "metrics.jsonl", run / "samples.jsonl"
    ]  # fmt: skip
