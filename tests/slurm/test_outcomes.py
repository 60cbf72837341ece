"""How a job ends, by Slurm's own state and the processes on its nodes."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program.states import records
from tests.slurm.machines import ROOT
from tests.slurm.slurm import GPUS, LOST_S, SCRIPT, SMALL, Job, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

Submit = Callable[..., Job]


def steps_done(run: Path) -> list[int]:
    return [int(record["step"]) for record in records(run)]


def test_a_run_that_ends_well_has_had_all_its_nodes_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    clone, elsewhere, runs = tmp_path / "a clone", tmp_path / "another place", tmp_path / "my runs"
    clone.symlink_to(ROOT)
    elsewhere.mkdir()
    temporary = tmp_path / "a directory with a name that is too long for sockets below it"
    temporary.mkdir()
    arguments = ("experiment=cpu_digits", "algorithm.warmup_steps=0", "name=run", f"runs_dir={runs}", "steps=4")

    job = slurm.submit(
        *arguments,
        script=clone / "launch" / "slurm_grpo.sh",
        cwd=elsewhere,
        options=["--nodes=3", "--cpus-per-task=4", "--gpus-per-node=2"],
        more=SMALL | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(temporary)},
    )

    assert job.end() == "COMPLETED 0:0", job.output()
    job.leaves_nothing()
    found = json.loads((runs / "run" / "found.json").read_text())
    assert found["nodes"] == {name: {"CPU": 4, "GPU": 2} for name in slurm.names}  # of 16 and 4
    assert GPUS == 4
    for i, process in enumerate(found["processes"], 1):
        assert process["SLURMD_NODENAME"] == f"node{i}"
        assert process["address"] == f"10.77.0.{i}"  # though its own name is 127.0.1.1 there
        assert process["NCCL_SOCKET_IFNAME"] == "eth0"
        assert process["GLOO_SOCKET_IFNAME"] == "lo"  # as the user had set it
    assert Path(found["cwd"]) == ROOT
    logs = {path.name for path in (runs / "run" / "log" / f"job-{job.number}-0").iterdir()}
    assert logs >= {"ray-node1.log", "ray-node2.log", "ray-node3.log", "program.log"}
    assert Path(job.fields()["StdOut"]).parent == elsewhere


def test_a_program_that_fails_gives_the_job_its_exit_code(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    """Also in a script of the user's own, to whose job no variable goes but three."""
    script = tmp_path / "my script.sh"
    script.write_text(f'#!/bin/bash\nexec {SCRIPT} "$@"\n')
    job = submit("--nodes=1", "--export=MRL_PYTHON,DRIVER,PATH", script=script, driver="exit 3")

    assert job.end() == "FAILED 3:0", job.output()
    job.leaves_nothing()
    log = tmp_path / "my runs" / "run" / "log" / f"job-{job.number}-0" / "program.log"
    assert "ends as it was told" in log.read_text()


def test_jobs_that_cannot_work_are_refused_before_anything_starts(slurm: Slurm, submit: Submit) -> None:
    said = {
        submit("--nodes=2", steps=-1): "refused: steps=-1 must be at least 0",
        submit("--nodes=1", more=("cluster.nodes=2",)): "Submit with sbatch --nodes=2, or set cluster.nodes=1",
        submit("--nodes=1", "--nodelist=node1", MRL_INTERFACE="ib0"): (
            "MRL_INTERFACE=ib0 is no interface of node1 with an IPv4 address. Set it to one of: eth0 (10.77.0.1)"
        ),
    }

    for job, text in said.items():
        assert job.end(timeout_s=30) == "FAILED 2:0"
        assert text in job.output()


@pytest.mark.parametrize("text", ["logs in", "step 2/"], ids=["starting", "running"])
def test_a_cancelled_job_leaves_nothing(slurm: Slurm, submit: Submit, text: str) -> None:
    job = submit("--nodes=2", steps=1000)
    job.wait_for_text(text)

    slurm.run("scancel", job.number)

    job.leaves_nothing()
    assert job.end().startswith("CANCELLED")


def test_a_node_that_is_switched_off_fails_the_job_and_is_named(slurm: Slurm, submit: Submit) -> None:
    job = submit("--nodes=2", "--nodelist=node1,node3", steps=1000)
    job.wait_for_text("step 2/")

    slurm.machines.off("node3")

    job.wait_for(job.recorded, what="Slurm has recorded its end", timeout_s=LOST_S)
    assert re.fullmatch(r"FAILED [1-9]\d*:0", job.recorded())
    assert "lost node3" in job.output()
    job.leaves_nothing()


def roles(run: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((run / "found.json").read_text())["nodes"]
    return found


def test_the_components_of_a_job_are_nodes_for_the_trainer_and_nodes_for_the_engines(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit("--nodes=1", ":", "--nodes=2", "--cpus-per-task=3")

    assert job.end() == "COMPLETED 0:0", job.output()
    trainer, *engines = roles(tmp_path / "my runs" / "run").values()
    assert trainer == {"CPU": 4, "trainer": 1}
    assert engines == [{"CPU": 3, "rollout": 1}] * 2


def test_nodes_with_a_feature_hold_the_engines(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    job = submit("--nodes=2", "--constraint=[small*1&large*1]", MRL_ROLLOUT_CONSTRAINT="large")

    assert job.end() == "COMPLETED 0:0", job.output()
    trainer, engine = roles(tmp_path / "my runs" / "run").items()
    assert trainer == ("node1", {"CPU": 4, "trainer": 1})  # the only one that is small
    assert engine[1] == {"CPU": 4, "rollout": 1}


def test_a_job_that_loses_a_node_is_requeued_where_that_was_asked_for(
    slurm: Slurm, submit: Submit, tmp_path: Path
) -> None:
    job = submit("--nodes=2", steps=24, MRL_REQUEUES=1)
    job.wait_for_text("step 2/")

    slurm.machines.process("node2", "raylet").kill()

    job.start_again()
    assert job.end() == "COMPLETED 0:0"
    assert job.fields()["Restarts"] == "1"
    assert (tmp_path / "my runs" / "run" / "log" / f"job-{job.number}-1" / "ray-node2.log").exists()


def resumed(job: Job, run: Path, *, steps: int) -> None:
    """The job was stopped once in the middle, and went on behind its checkpoint."""
    job.wait_for_text("requeued, to go on from")
    job.start_again()
    assert job.end() == "COMPLETED 0:0", job.output()
    assert job.fields()["Restarts"] == "1"
    assert steps_done(run) == list(range(1, steps + 1))
    (saved,) = (run / "checkpoints").iterdir()
    assert f"to go on from {saved}" in job.output()


def test_sigusr1_by_hand_saves_requeues_and_resumes(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    job = submit("--nodes=1", steps=20)
    job.wait_for_text("step 2/")

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)

    resumed(job, tmp_path / "my runs" / "run", steps=20)


def test_a_preempted_job_saves_requeues_and_resumes(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    job = submit("--nodes=2", steps=20)
    job.wait_for_text("step 2/")

    slurm.run("sbatch", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    resumed(job, tmp_path / "my runs" / "run", steps=20)


def test_a_job_at_its_time_limit_saves_requeues_and_resumes(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    """The limit is set when the program runs: Slurm looks at limits every 30 s, and counts them in minutes."""
    job = submit("--nodes=1", "--time=10", "--signal=B:USR1@90", steps=240)
    job.wait_for_text("step 2/")
    slurm.run("scontrol", "update", f"jobid={job.number}", "timelimit=2")
    job.wait_for_text("requeued, to go on from")
    slurm.run("scontrol", "update", f"jobid={job.number}", "timelimit=10")

    resumed(job, tmp_path / "my runs" / "run", steps=240)


def test_a_program_that_does_not_stop_in_time_is_ended_and_the_job_requeued(slurm: Slurm, submit: Submit) -> None:
    job = submit("--nodes=1", driver="deaf 2", steps=20, MRL_GRACE_S=2)
    job.wait_for_text("step 3/")

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)

    job.wait_for_text("no checkpoint within MRL_GRACE_S=2 s: ending the program")
    job.wait_for_text("/my runs/run/checkpoints/step_000002")
    job.start_again()
    assert job.end() == "COMPLETED 0:0"
    assert job.fields()["Restarts"] == "1"


def test_a_job_that_would_come_no_further_is_not_requeued(slurm: Slurm, submit: Submit) -> None:
    job = submit("--nodes=1", driver="deaf 1000", steps=1000, MRL_GRACE_S=2)
    job.wait_for_text("step 3/")

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)

    assert job.end().startswith("FAILED ")
    assert "no checkpoint was saved in time, nor since the start: not requeued. Give SIGUSR1 the time" in job.output()


def test_a_job_whose_time_limit_leaves_none_to_start_is_not_requeued(slurm: Slurm, submit: Submit) -> None:
    job = submit("--nodes=1", "--time=2", steps=1000)
    job.wait_for_text("logs in")

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)

    assert job.end() == "FAILED 1:0", job.output()
    assert "stopped before the program started without a new checkpoint; the next start has as little" in job.output()


def test_a_job_that_may_not_be_requeued_says_how_to_go_on(slurm: Slurm, submit: Submit) -> None:
    job = submit("--nodes=1", "--no-requeue", steps=1000)
    job.wait_for_text("step 2/")

    slurm.run("scancel", "--signal=USR1", job.number)  # without --batch: Ray's processes are signalled too

    assert job.end() == "FAILED 85:0"
    assert "Slurm does not requeue this job. Submit the same command: it resumes." in job.output()


def test_a_second_job_on_the_same_nodes_is_not_disturbed(slurm: Slurm, submit: Submit) -> None:
    first = submit("--nodes=2", "--nodelist=node1,node2", steps=1000, name="first")
    second = submit("--nodes=2", "--nodelist=node1,node2", steps=30, name="second")
    for job in (first, second):
        job.wait_for_text("step 2/")

    slurm.run("scancel", first.number)

    assert first.end().startswith("CANCELLED")
    assert second.end() == "COMPLETED 0:0"
    second.leaves_nothing()


def test_a_node_that_never_comes_is_named_at_the_deadline(slurm: Slurm, submit: Submit) -> None:
    slurmd = slurm.slurmd("node3")
    slurmd.send_signal(signal.SIGSTOP)
    try:
        job = submit("--nodes=2", "--nodelist=node1,node3", MRL_READY_S=10)
        job.wait_for_text("1 of 2 nodes were ready within MRL_READY_S=10: node3 did not come. See ray-node3.log")
    finally:
        slurmd.send_signal(signal.SIGCONT)

    assert job.end() == "FAILED 75:0"
    job.leaves_nothing()
