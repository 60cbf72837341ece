"""What the job script and its steps refuse or find out by themselves, without a Slurm."""

import fcntl
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from launch import job_steps
from launch.job_steps import LONGEST_PARENT, REFUSED, cpus_of_job, temporary_parent
from tests.slurm.machines import environment
from tests.slurm.slurm import SCRIPT

OF_A_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "node1",
}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a step of a job on two nodes."""
    for name, value in OF_A_STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_steps, "own_address", lambda **_: ("127.0.0.1", "lo"))  # a machine may have no other
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a step ignores SIGUSR1, and pytest does not


def plan(runs: Path, *more: str) -> int:
    return job_steps.main("plan", "2", "experiment=cpu_digits", "name=run", f"runs_dir={runs}", *more)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "this is no job of Slurm. Submit it: sbatch OPTIONS "),
        ({"SLURM_JOB_ID": "7", "MRL_GRACE_S": "9m"}, "refused: MRL_GRACE_S=9m is no whole number, without a unit."),
        ({"SLURM_JOB_ID": "7", "MRL_REQUEUES": "007"}, "refused: MRL_REQUEUES=007 is no whole number"),
    ],
)
def test_the_script_says_at_once_what_it_could_not_use_later(variables: dict[str, str], said: str) -> None:
    done = subprocess.run(
        [SCRIPT, "experiment=cpu_digits"], env=environment() | variables, capture_output=True, text=True, check=False
    )

    assert done.returncode == REFUSED
    assert said in done.stdout


@pytest.mark.usefixtures("step")
def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()

    assert plan(tmp_path / "file") == REFUSED
    assert "cannot be made: [Errno 20] Not a directory" in capsys.readouterr().err


@pytest.mark.usefixtures("step")
def test_a_second_job_in_one_run_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path) == 0
    with (tmp_path / "run" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert plan(tmp_path) == REFUSED

    assert "Another process is running in" in capsys.readouterr().err
    assert plan(tmp_path) == 0


@pytest.mark.usefixtures("step")
def test_a_job_with_too_few_cpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path) == 0  # two trainer ranks, one engine, one for the reward
    assert plan(tmp_path, "rollout.engines=2") == REFUSED
    said = capsys.readouterr().err
    assert "The job has 4 CPUs, and the run needs 5: one for each" in said
    assert "Submit with sbatch --cpus-per-task=3, or on more nodes." in said


@pytest.mark.usefixtures("step")
def test_a_job_without_the_gpus_that_the_config_counts_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus = ("cluster.nodes=2", "cluster.gpus_per_node=4")

    assert plan(tmp_path, *on_gpus) == REFUSED
    said = capsys.readouterr().err
    assert "cluster.gpus_per_node=4, and the job has 0 on node1" in said and "--gpus-per-node=4" in said
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert plan(tmp_path, *on_gpus) == 0


def test_the_cpus_of_a_job_are_those_of_its_nodes_and_components() -> None:
    assert cpus_of_job({"SLURM_JOB_CPUS_PER_NODE": "4(x2),3"}) == 11
    groups = {"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "3(x2)"}
    assert cpus_of_job({"SLURM_HET_SIZE": "2", **groups}) == 10


@pytest.mark.usefixtures("step")
def test_runs_that_start_together_in_one_job_look_at_different_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = []
    for i in range(3):
        monkeypatch.setenv("SLURM_STEP_ID", str(i))
        plan(tmp_path)
        ports.append(capsys.readouterr().out.split()[-1])

    assert len(set(ports)) == 3


@pytest.mark.usefixtures("step")
def test_a_node_that_does_not_see_the_logs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_steps, "SHARED_S", 0.1)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")

    assert job_steps.main("start", "node1", "127.0.0.1", "1", str(tmp_path / "elsewhere"), "") == REFUSED
    assert f"node1 does not see {tmp_path / 'elsewhere'}, which the job's first node" in capsys.readouterr().err


@pytest.mark.usefixtures("step")
def test_a_home_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    monkeypatch.setenv("HOME", "/proc/none")

    assert job_steps.main("start", "node1", "127.0.0.1", "1", str(tmp_path), "") == REFUSED
    assert "The home /proc/none cannot be written on node1" in capsys.readouterr().err


def test_ray_puts_its_files_where_their_names_are_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of its sockets: a session's number is of the driver's start and process."""
    socket = "/mrl-ray-abcdefgh/session_2026-11-30_07-11-24_123456_4194304/sockets/plasma_store"
    assert LONGEST_PARENT + len(os.fsencode(socket)) <= 107

    for parent, chosen in ((Path("/" + "a" * 25), Path("/" + "a" * 25)), (Path("/" + "a" * 26), Path("/tmp"))):
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        assert temporary_parent() == chosen
