"""What starting the program through Slurm costs; by itself, as other tests beside it would be measured too."""

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from tests.program.states import differences, records
from tests.slurm.machines import ROOT
from tests.slurm.slurm import Job, Slurm, run_here

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

OVERHEAD_S = 20.0
"""Where the same run takes less without Slurm; on a machine busy with other things it may take twice as long."""
STEPS = 40


def first_step_s(run: Path) -> float:
    """When the run had done step 1, in seconds since 1970."""
    for line in (run / "log" / "driver.log").read_text().splitlines():
        if re.search(r" step 1/\d+  ", line):
            return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    raise AssertionError(f"{run} has done no step")


def test_a_stopped_run_resumes_behind_its_checkpoint_and_starting_it_costs_little(
    slurm: Slurm, submit: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone, runs = tmp_path / "a clone", tmp_path / "my runs"
    clone.symlink_to(ROOT)
    arguments = ("mode=sft", "sft.steps=0", "data.held_out=16", "sft.warmup_steps=0")
    more = (*arguments, "trainer.ranks_per_node=1")
    job = submit("--nodes=2", driver=None, steps=STEPS, more=more, script=clone / "launch" / "slurm_grpo.sh")
    job.wait_for_text("step 3/")
    started_s = datetime.fromisoformat(job.fields()["StartTime"]).timestamp()

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)

    (saved,) = job.wait_for(lambda: re.findall(r"step_(\d+) is saved", job.output()), what="it has saved")
    job.wait_for_text("requeued, to go on from")
    through_slurm_s = first_step_s(runs / "run") - started_s
    job.start_again()
    assert job.end() == "COMPLETED 0:0", job.output()
    assert [record["step"] for record in records(runs / "run")] == list(range(1, STEPS + 1))
    assert f"step {int(saved) + 1}/{STEPS}" in (runs / f"run/log/job-{job.number}-1/program.log").read_text()

    begun_s = run_here(runs, "machine", *arguments, f"steps={STEPS}", "algorithm.warmup_steps=0")
    alone_s = first_step_s(runs / "machine") - begun_s
    assert differences(runs / "machine", runs / "run", step=STEPS) == []
    with capsys.disabled():
        print(f"\nuntil the first step: {through_slurm_s:.1f} s through Slurm on 2 nodes, {alone_s:.1f} s without")
    assert through_slurm_s - alone_s < max(OVERHEAD_S, alone_s)
