"""Sweeps over a queue that stands for Slurm's: what is submitted when, and what is made of the answers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_rl.errors import BackendError, ConfigError
from megatron_rl.sweeps.__main__ import main as show
from megatron_rl.sweeps.points import load_all
from tests.sweeps.conftest import Queue

Sweep = Callable[..., int]


def states(tmp_path: Path) -> dict[str, str]:
    return {point.name: point.state for point in load_all(tmp_path / "runs" / "tried-sweep")}


@pytest.fixture
def submit(sweep: Sweep, queue: Queue) -> Sweep:
    """A sweep by slurm_grpo, which looks at the queue without pause."""
    launcher = ("hydra/launcher=slurm_grpo", f"hydra.launcher.script={queue.script()}", "hydra.launcher.poll_s=0")
    return lambda *arguments: sweep(*launcher, *arguments)


def test_a_failed_point_stands_in_the_table_and_a_second_start_runs_only_it(
    submit: Sweep, queue: Queue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("seed=12,13,14", "algorithm.lr=4e-6", "algorithm.min_lr=0") == 1

    printed = capsys.readouterr()
    assert states(tmp_path) == {"seed_12": "COMPLETED", "seed_13": "FAILED", "seed_14": "COMPLETED"}
    table = printed.out[printed.out.index("point  ") :].splitlines()
    assert table[1].split()[:6] == ["seed_12", "COMPLETED", "1.000", "(step", "1)", "1"]
    assert table[2].split()[:2] == ["seed_13", "FAILED"] and table[2].endswith("seed_13/log/job.log")
    assert table[3] == "    unlucky"
    assert "failed: 1 of 3 points" in printed.err
    assert [job["arguments"][-1] for job in queue.jobs()] == ["name=seed_12", "name=seed_13", "name=seed_14"]

    assert submit("seed=12,13,14", "algorithm.lr=4e-6", "algorithm.min_lr=0") == 1

    assert [job["arguments"][-1] for job in queue.jobs()[3:]] == ["name=seed_13"]


def test_at_most_so_many_points_are_in_the_queue(submit: Sweep, queue: Queue) -> None:
    assert submit("seed=1,2,3,4,5", "hydra.launcher.at_once=2") == 0

    assert [job["beside"] for job in queue.jobs()] == [0, 1, 0, 1, 0]


def test_what_squeue_shows_the_user_by_default_does_not_matter(
    submit: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "another")

    assert submit("seed=1,2") == 0
    assert states(tmp_path) == {"seed_1": "COMPLETED", "seed_2": "COMPLETED"}


@pytest.mark.parametrize("option", ["gpus", "gpus_per_task"])
def test_gpus_that_the_job_script_would_refuse_are_refused(submit: Sweep, queue: Queue, option: str) -> None:
    with pytest.raises(ConfigError, match=r"gives no node GPUs of its own.*gpus_per_node, or gres"):
        submit("seed=1,2", f"hydra.launcher.sbatch.{option}=8")

    assert queue.jobs() == []


def test_jobs_that_still_run_are_watched_and_not_submitted_again(
    submit: Sweep, queue: Queue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit("seed=1,2")
    directory = tmp_path / "runs" / "tried-sweep"
    # As a sweep leaves it that was killed: once behind sbatch, once before it wrote down the job's number.
    for name, changes in {"seed_1": {"state": "RUNNING"}, "seed_2": {"state": "SUBMITTING", "job": "99"}}.items():
        file = directory / name / "point.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    for job in queue.jobs():
        (queue.path / f"{job['number']}.job").write_text(json.dumps({**job, "state": "PENDING"}))
    capsys.readouterr()

    assert show([str(directory)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["RUNNING", "RUNNING"]
    assert submit("seed=1,2") == 0

    assert len(queue.jobs()) == 2
    assert states(tmp_path) == {"seed_1": "COMPLETED", "seed_2": "COMPLETED"}
    assert [point.job for point in load_all(directory)] == ["100", "101"]


def test_a_job_that_slurm_has_forgotten_ended_as_its_run_says(submit: Sweep, queue: Queue, tmp_path: Path) -> None:
    submit("seed=1,13")
    for name in ("seed_1", "seed_13"):
        file = tmp_path / "runs" / "tried-sweep" / name / "point.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "state": "RUNNING"}))
    for file in queue.path.glob("*.job"):
        file.unlink()

    assert submit("seed=1,13", "--dry-run") == 0 and queue.jobs() == []
    assert submit("seed=1,13") == 1

    assert [job["arguments"][-1] for job in queue.jobs()] == ["name=seed_13"]


def test_a_finished_point_is_not_taken_for_another_run(submit: Sweep) -> None:
    submit("seed=1,2")

    with pytest.raises(
        ConfigError, match="seed_1 is COMPLETED with .* this sweep asks for .*steps=100.* hydra.sweep.dir"
    ):
        submit("seed=1,2", "steps=100")


def test_a_controller_that_is_silent_for_a_moment_is_asked_again(submit: Sweep, queue: Queue, tmp_path: Path) -> None:
    (queue.path / "silent").touch()

    assert submit("seed=1") == 0

    assert states(tmp_path) == {"one_point": "COMPLETED"}


def test_what_slurm_does_not_take_is_said_in_its_words_before_any_job(submit: Sweep, queue: Queue) -> None:
    with pytest.raises(BackendError, match="would not take the sweep's jobs: .*invalid partition specified: none"):
        submit("seed=1,2", "hydra.launcher.sbatch.partition=none")

    assert queue.jobs() == []


def test_optunas_trials_wait_for_their_jobs_and_learn_from_their_rewards(
    submit: Sweep, queue: Queue, tmp_path: Path, optuna: None
) -> None:
    options = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2")

    code = submit("algorithm.lr=interval(1e-6,1e-5)", "algorithm.min_lr=0.0", *options, "hydra.sweeper.sampler.seed=3")

    assert (code, len(queue.jobs())) == (0, 6)
    assert [job["beside"] for job in queue.jobs()] == [0, 1] * 3
    rates = [float(argument[13:]) for job in queue.jobs() for argument in job["arguments"] if "lr=" in argument[:13]]
    results = yaml.safe_load((tmp_path / "runs" / "tried-sweep" / "optimization_results.yaml").read_text())
    assert results["best_params"] == {"++algorithm.lr": min(rates, key=lambda rate: abs(rate - 4e-6))}


def test_a_failed_trial_ends_an_optuna_sweep(submit: Sweep, queue: Queue, optuna: None) -> None:
    options = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1")

    with pytest.raises(BackendError, match="seed_13 is FAILED; its log is .*seed_13/log/job.log"):
        submit("seed=choice(13)", *options)

    assert len(queue.jobs()) == 1


def test_a_sweep_that_needs_rewards_refuses_runs_without(submit: Sweep, queue: Queue, optuna: None) -> None:
    with pytest.raises(ConfigError, match="mode=sft with .* has no eval/reward"):
        submit(
            "algorithm.min_lr=0", "algorithm.lr=interval(1e-6,1e-5)", "hydra/sweeper=optuna", "mode=sft", "sft.steps=0"
        )

    assert queue.jobs() == []
