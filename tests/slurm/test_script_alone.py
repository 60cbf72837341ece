"""What the job script makes of odd jobs: no_ray.sh stands for all that it starts, so that each takes seconds."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.slurm import SCRIPT, Job, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

NO_RAY = str(Path(__file__).with_name("no_ray.sh"))
OUTER = {
    "SLURM_GPUS": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "elsewhere",
    "SLURM_RESTART_COUNT": "4",
    "SLURM_ARRAY_JOB_ID": "1",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_EXACT": "1",
    "SRUN_CPUS_PER_TASK": "1",
    "SLURM_LABELIO": "1",
    "SQUEUE_FORMAT2": "jobid",
    "SQUEUE_STATES": "pending",
}
"""Of a job in which sbatch ran, and of somebody's .bashrc."""


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`submit(OPTION..., TEXT)`: a job of the script, or of a script of the user's, whose run is `tmp_path/run`."""
    numbers = []

    def do(*options: object, text: str = "", **environment: object) -> Job:
        script = SCRIPT
        if text:
            script = tmp_path / "my script.sh"
            script.write_text(f"#!/bin/bash\n{text}\n")
        job = slurm.submit(
            script=script,
            options=["--requeue", f"--output={tmp_path}/%j.out", *options],
            more={
                "MRL_PYTHON": NO_RAY,
                "RUN": str(tmp_path / "run"),
                "SCRIPT": str(SCRIPT),
                **{name: str(value) for name, value in environment.items()},
            },
        )
        numbers.append(job.number)
        return job

    yield do
    for number in numbers:
        slurm.run("scancel", "--quiet", number)


def told(run: Path, job: Job) -> dict[str, str]:
    """What the step that holds a node has printed there."""
    logs = (run / "log" / f"job-{job.number}-0").glob("ray-*.log")
    return {path.stem.removeprefix("ray-"): path.read_text() for path in logs}


def test_variables_of_another_job_or_of_the_users_taste_change_nothing(
    submit: Callable[..., Job], tmp_path: Path
) -> None:
    job = submit("--nodes=2", "--nodelist=node1,node2", "--cpus-per-task=4", "--mem=1000", **OUTER)

    assert job.end() == "COMPLETED 0:0", job.output()
    assert "start 0, on node1 node2; Ray at 127.0.0.1:1; logs in " in job.output()
    for text in told(tmp_path / "run", job).values():
        assert text.startswith("has 4 CPUs, 0 GPUs\n") and "asked to end\n" in text, text


def test_what_a_site_prints_before_each_step_is_no_node(submit: Callable[..., Job]) -> None:
    job = submit("--nodes=1", CODE=137)

    assert job.end() == "FAILED 137:0", job.output()  # as the program's, not 75 for a node
    assert "137: it was killed, by somebody or for want of memory. The same command resumes." in job.output()


def test_a_script_of_the_users_may_name_ours_from_where_it_is(submit: Callable[..., Job]) -> None:
    job = submit("--nodes=1", text=f"cd {shlex.quote(str(SCRIPT.parents[1]))} && exec launch/slurm_grpo.sh")

    assert job.end() == "COMPLETED 0:0", job.output()


def test_a_node_that_refuses_is_not_asked_again(submit: Callable[..., Job]) -> None:
    job = submit("--nodes=1", START_CODE=2, MRL_REQUEUES=3)

    assert job.end() == "FAILED 2:0", job.output()
    assert "did not start. The end of " in job.output()
    assert job.fields()["Restarts"] == "0"


def test_a_job_that_is_preempted_before_its_program_starts_is_requeued(
    slurm: Slurm, submit: Callable[..., Job]
) -> None:
    """Its end is near then, which its time limit is not."""
    job = submit("--nodes=1", "--nodelist=node1", "--time=60", PLAN_S=6)
    job.wait_for(lambda: any(" plan 1" in title for title in slurm.machines.titles("node1")), what="it is planned")

    slurm.run("sbatch", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    job.wait_for(lambda: job.fields()["Restarts"] == "1", what="it is requeued")
    assert "stopped before the program started; requeued" in job.output()


def test_a_copy_of_the_script_says_that_it_is_none_of_a_clone(submit: Callable[..., Job]) -> None:
    job = submit("--nodes=1", "--nodelist=node1", text=SCRIPT.read_text())

    assert job.end() == "FAILED 1:0"
    assert job.output().endswith("node1 has no clone. Submit launch/slurm_grpo.sh itself, in one that all nodes see.\n")


def test_every_component_of_a_job_is_asked_to_end(submit: Callable[..., Job], tmp_path: Path) -> None:
    job = submit("--nodes=1", ":", "--nodes=2", "--gpus-per-node=2")

    assert job.end() == "COMPLETED 0:0", job.output()
    texts = list(told(tmp_path / "run", job).values())
    assert sorted(text.splitlines()[0] for text in texts) == ["has 1 CPUs, 0 GPUs", *["has 1 CPUs, 2 GPUs"] * 2]
    assert all("asked to end\n" in text for text in texts), (texts, job.output())


@pytest.mark.parametrize("option", ["--gpus=4", "--gpus-per-task=1"])
def test_gpus_that_no_step_would_get_whole_are_refused(submit: Callable[..., Job], option: str) -> None:
    job = submit("--ntasks-per-node=4", "--nodes=1", option)

    assert job.end() == "FAILED 2:0"
    assert "Submit with sbatch --gpus-per-node=N." in job.output()


def test_a_feature_that_does_not_tell_nodes_apart_is_refused(submit: Callable[..., Job]) -> None:
    job = submit("--nodes=2", "--nodelist=node2,node3", MRL_ROLLOUT_CONSTRAINT="large")

    assert job.end() == "FAILED 2:0"
    assert "refused: MRL_ROLLOUT_CONSTRAINT=large is a feature of all or none of node2 node3." in job.output()


def test_sigusr1_while_the_job_is_planned_is_not_lost(slurm: Slurm, submit: Callable[..., Job]) -> None:
    job = submit("--nodes=1", "--nodelist=node1", PLAN_S=3)
    job.wait_for(lambda: any(" plan 1" in title for title in slurm.machines.titles("node1")), what="it is planned")

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)

    job.wait_for(lambda: job.fields()["Restarts"] == "1", what="it is requeued")
    assert "stopped before the program started; requeued" in job.output()


@pytest.mark.parametrize("to", [[], ["--full"]], ids=["steps", "everything"])
def test_sigusr1_that_was_not_meant_for_the_script_alone_stops_the_program(
    slurm: Slurm, submit: Callable[..., Job], to: list[str]
) -> None:
    job = submit("--nodes=1", PROGRAM_S=100)
    job.wait_for_text("the program runs")

    slurm.run("scancel", "--signal=USR1", *to, job.number)

    job.wait_for(lambda: job.fields()["Restarts"] == "1", what="it is requeued")
    assert "the program has stopped; requeued" in job.output()


def test_a_task_of_an_array_is_requeued_alone(slurm: Slurm, submit: Callable[..., Job], tmp_path: Path) -> None:
    """The last one has the number of the whole array."""
    number = submit("--nodes=1", "--array=1-2", f"--output={tmp_path}/%A_%a.out", PROGRAM_S=5).number
    first, last = Job(slurm, f"{number}_1"), Job(slurm, f"{number}_2")
    for task in (first, last):
        task.wait_for_text("the program runs")
    assert last.fields()["JobId"] == str(number)

    slurm.run("scancel", "--signal=USR1", "--batch", last.number)

    last.wait_for(lambda: last.fields()["Restarts"] == "1", what="it is requeued")
    assert first.end() == "COMPLETED 0:0", first.output()
    assert first.fields()["Restarts"] == "0"


def test_a_run_ends_alone_in_its_allocation(slurm: Slurm, submit: Callable[..., Job], tmp_path: Path) -> None:
    job = submit(
        *("--nodes=1", "--nodelist=node1", "--cpus-per-task=2"),
        text=f"""
        PROGRAM_S=1 $SCRIPT & short=$!
        PROGRAM_S=1000 $SCRIPT & long=$!
        wait $short; echo "short ended with $?"
        until [[ -e {shlex.quote(str(tmp_path))}/end ]]; do sleep 0.1; done
        kill -TERM $long; wait $long; echo "long ended with $?"
        sleep 1000
        """,
    )
    job.wait_for_text("short ended with 0")
    job.wait_for_text("the program runs")
    assert "lost" not in job.output()

    (tmp_path / "end").touch()

    job.wait_for_text("long ended with 130")
    assert not [title for title in slurm.machines.titles("node1") if "no_ray" in title]
