"""The engines' failures: one that dies in the middle of a run, one that does not start, a cluster that is not there."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.program.conftest import MIDDLE, STEPS, Finished, World
from tests.program.program import DONE, FAILED, Ended, finish, running
from tests.program.states import differences, records, samples

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run that was started four times."""

    path: Path
    deaths: tuple[Ended, ...]
    """Its scheduler, its server's first process, and the driver killed."""
    last: Ended


@pytest.fixture(scope="module")
def interrupted_training(world: World, trained: Finished) -> Interrupted:
    """`trained` from step MIDDLE on, with a kill in each of three attempts, and finished by the fourth."""
    path = world.cut(trained.path, "interrupted")
    arguments, deaths = world.arguments("interrupted"), []
    for victim in ("sglang::scheduler", "megatron_rl.rollout.launch", None):
        with running(arguments, world.output("interrupted")) as run:
            run.wait_for(f"step {MIDDLE + 1}/")
            if victim is None:
                run.signal(signal.SIGKILL)
            else:
                run.kill(victim)
            deaths.append(run.end())
        assert not (path / f"checkpoints/step_{STEPS:06d}").exists(), "all steps were done before the kill arrived"
    return Interrupted(path, tuple(deaths), finish(arguments, world.output("interrupted")))


def test_an_engine_that_does_not_start_is_reported_in_its_own_words(world: World) -> None:
    arguments = world.arguments("bad-option", mode="rollout_only", rollout__sglang__attention_backend="flashy")

    ended = finish(arguments, world.output("bad-option"))

    ended.said(
        r"engine-0 did not start: error: argument --attention-backend: invalid choice: 'flashy'.*\n"
        r"It ended with exit code 2\. Its log is .*engine-0\.log",
        code=FAILED,
    )


def test_a_cluster_that_does_not_answer_is_named(world: World) -> None:
    """Port 1 belongs to nobody."""
    arguments = world.arguments("no-cluster", mode="sft", sft__steps=0, cluster__address="127.0.0.1:1")

    ended = finish(arguments, world.output("no-cluster"))

    ended.said(r"No Ray cluster answers at cluster\.address=127\.0\.0\.1:1.*refused.*address null", code=FAILED)


def test_rollout_only_samples_and_judges_and_trains_nothing(world: World) -> None:
    path = world.runs / "sampled"

    ended = finish(world.arguments("sampled", mode="rollout_only", steps=2), world.output("sampled"))

    assert ended.code == DONE, ended.text
    assert ended.left_behind == ()
    assert [r["step"] for r in records(path)] == [1, 2]
    assert [s["step"] for s in samples(path)] == [1] * 32 + [2] * 32
    assert {s["version"] for s in samples(path)} == {0}
    assert not (path / "checkpoints").exists() and not (path / "hf").exists()


def test_killed_engines_and_a_killed_driver_are_reported_and_the_run_resumes(
    world: World, interrupted_training: Interrupted
) -> None:
    """One chain of kills on one run directory: see the fixture."""
    scheduler, server, driver = interrupted_training.deaths

    scheduler.said(r"engine-0 ended during (?s:.*)engine-0\.log(?s:.*)Resume with the same command", code=FAILED)
    server.said(r"engine-0 ended during (?s:.*)exit code -9(?s:.*)Resume with the same command", code=FAILED)
    assert driver.code == -signal.SIGKILL
    assert driver.left_behind == ()
    assert interrupted_training.last.code == DONE, interrupted_training.last.text
    assert interrupted_training.last.left_behind == ()


def test_a_resumed_run_samples_and_trains_as_an_uninterrupted_one(
    trained: Finished, interrupted_training: Interrupted
) -> None:
    path = interrupted_training.path

    assert records(path) == records(trained.path)
    assert samples(path) == samples(trained.path)
    assert differences(trained.path, path, step=STEPS) == []
