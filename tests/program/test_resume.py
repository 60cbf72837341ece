"""A run that is killed goes on as if nothing had happened: bit for bit where no engine samples anew."""

import signal

import pytest

from tests.program.conftest import MIDDLE, STEPS, Finished, World
from tests.program.program import DONE, FAILED, INTERRUPTED, STOPPED, finish, running
from tests.program.states import differences, records

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]


def test_training_on_recorded_samples_gives_the_weights_of_the_run_that_recorded_them(
    trained: Finished, replayed: Finished
) -> None:
    assert replayed.ended.left_behind == ()
    assert differences(trained.path, replayed.path, step=STEPS) == []


def test_three_steps_a_dead_rank_a_killed_driver_and_three_more_steps_are_six_steps_bit_for_bit(
    world: World, trained: Finished, replayed: Finished
) -> None:
    arguments = world.replay_arguments("killed", trained.path / "samples.jsonl")
    path = world.runs / "killed"

    with running(arguments, world.output("rank-killed"), hold_at="step 1/") as run:
        run.wait_until_held()
        run.kill("ray::Worker")
        run.release()
        ended = run.end()
    ended.said(r"trainer-\d died\. (?s:.*)Resume with the same command", code=FAILED)
    assert [r["step"] for r in records(path)] == [0, 1]

    with running(arguments, world.output("driver-killed"), hold_at=f"step {MIDDLE + 1}/") as run:
        run.wait_until_held()
        run.signal(signal.SIGKILL)
        ended = run.end()
    assert (ended.code, ended.left_behind) == (-signal.SIGKILL, ())

    ended = finish(arguments, world.output("resumed"))
    assert ended.code == DONE, ended.text
    assert f"resuming after step {MIDDLE}: weights, optimizer, " in ended.text
    assert differences(replayed.path, path, step=STEPS) == []
    assert records(path) == records(replayed.path)


def test_stopped_runs_save_what_can_be_saved_and_end_as_if_they_had_not_been_stopped(
    world: World, trained: Finished, replayed: Finished
) -> None:
    arguments = world.replay_arguments("stopped", trained.path / "samples.jsonl")
    path = world.runs / "stopped"

    with running([*arguments, "sft.steps=10000"], world.output("stopped-in-warm-start")) as run:
        run.wait_for("warm start ")
        run.signal(signal.SIGUSR1)
        ended = run.end()
    ended.said(r"stopped: \d+ of the warm start's 10000 steps are lost", code=STOPPED)

    with running(arguments, world.output("stopped"), hold_at="step 1/") as run:
        run.wait_until_held()
        run.signal(signal.SIGUSR1)
        run.release()
        ended = run.end()
    ended.said(r"stopped: .*/step_000001 is saved. The same command resumes", code=STOPPED)
    assert not (path / "hf").exists()

    ended = finish(arguments, world.output("resumed"))
    assert ended.code == DONE, ended.text
    assert differences(replayed.path, path, step=STEPS) == []
    assert records(path) == records(replayed.path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_that_it_resumes_and_leaves_nothing(world: World, number: signal.Signals) -> None:
    arguments = world.arguments(f"interrupted-{number.name}", mode="sft", steps=10_000, sft__steps=0)

    with running(arguments, world.output("interrupted")) as run:
        run.wait_for({signal.SIGINT: "step 4/", signal.SIGTERM: "starting Ray"}[number])
        run.signal(number)
        ended = run.end()

    ended.said("interrupted; the same command resumes", code=INTERRUPTED)


def test_a_resumed_run_does_not_become_another_one(world: World, trained: Finished, replayed: Finished) -> None:
    path = world.cut(replayed.path, "another")
    before = (path / "config.yaml").read_text()
    arguments = world.replay_arguments("another", trained.path / "samples.jsonl", seed=5)

    ended = finish(arguments, world.output("another"))

    ended.said(r"holds checkpoints of another run: seed: 0 -> 5.*Choose another name", code=2)
    assert (path / "config.yaml").read_text() == before
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == [f"step_{MIDDLE:06d}"]
