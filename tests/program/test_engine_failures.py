"""The engines' failures: one that dies in the middle of a run, one that does not start, a cluster that is not there."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.program.conftest import MIDDLE, STEPS, Finished, World
from tests.program.program import DONE, FAILED, Ended, Run, finish, running
from tests.program.states import differences, records, samples

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run that was started three times."""

    path: Path
    engine: Ended
    """Its engine was killed."""
    driver: Ended
    """The program itself was killed."""
    last: Ended


@pytest.fixture(scope="module")
def interrupted_training(world: World, trained: Finished) -> Interrupted:
    """`trained` from step MIDDLE on, with a kill in each of two attempts, and finished by the third."""
    path = world.cut(trained.path, "interrupted")
    arguments = world.arguments("interrupted")

    def attempt(kill: Callable[[Run], None]) -> Ended:
        with running(arguments, world.output("interrupted"), hold_at=f"step {MIDDLE + 1}/") as run:
            run.wait_until_held()
            kill(run)
            run.release()
            return run.end()

    engine = attempt(lambda run: run.kill("sglang::scheduler"))
    driver = attempt(lambda run: run.signal(signal.SIGKILL))
    return Interrupted(path, engine, driver, finish(arguments, world.output("interrupted")))


def test_a_killed_engine_is_reported_with_its_log(interrupted_training: Interrupted) -> None:
    interrupted_training.engine.said(
        r"engine-0 ended during (?s:.*)engine-0\.log(?s:.*)Resume with the same command", code=FAILED
    )


def test_a_killed_driver_leaves_no_process_and_has_somebody_say_so(interrupted_training: Interrupted) -> None:
    interrupted_training.driver.said(r"the program was killed, .*Resume with the same command", code=-signal.SIGKILL)


def test_a_resumed_run_samples_and_trains_as_an_uninterrupted_one(
    trained: Finished, interrupted_training: Interrupted
) -> None:
    path, last = interrupted_training.path, interrupted_training.last

    assert last.code == DONE, last.text
    assert last.left_behind == ()
    assert records(path) == records(trained.path)
    assert samples(path) == samples(trained.path)
    assert differences(trained.path, path, step=STEPS) == []


def test_rollout_only_samples_until_its_server_is_killed_and_loses_nothing_of_it(world: World) -> None:
    path = world.runs / "sampled"

    arguments = world.arguments("sampled", mode="rollout_only", model__path=world.model, steps=1000)

    with running(arguments, world.output("sampled")) as run:
        run.wait_for("step 2/")
        run.kill("megatron_rl.rollout.launch")
        ended = run.end()

    ended.said(r"engine-0 ended during /generate: (?s:.*)exit code -9(?s:.*)Resume with the same command", code=FAILED)
    done = records(path)[-1]["step"]
    assert done >= 2
    assert [r["step"] for r in records(path)] == list(range(1, done + 1))
    assert all(r["reward/mean"] is not None and "loss" not in r for r in records(path))
    steps = [s["step"] for s in samples(path)]
    assert steps in ([s for s in range(1, end + 1) for _ in range(8 * 4)] for end in (done, done + 1))
    assert {s["version"] for s in samples(path)} == {0}
    assert not (path / "checkpoints").exists() and not (path / "hf").exists()


def test_an_engine_that_does_not_start_is_reported_in_its_own_words(world: World) -> None:
    arguments = world.arguments("bad-option", rollout__sglang__attention_backend="flashy")

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
