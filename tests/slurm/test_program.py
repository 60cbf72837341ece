"""The program itself over several nodes, and what starting it through Slurm costs."""

import re
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.program.states import differences, records
from tests.slurm.cluster import ROOT, Cluster, Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

SHORT = ("data.held_out=16", "algorithm.warmup_steps=0", "sft.warmup_steps=0")
DEMO = ("experiment=cpu_digits", "steps=3", "sft.steps=3", *SHORT)
"""Cut short."""
DEADLINE_S = 400.0
OVERHEAD_S = 60.0
"""Of a start through Slurm; 20 is what it should be where nothing else runs."""


def submit(slurm: Cluster, runs: Path, name: str, *arguments: str, nodes: int) -> Job:
    runs.mkdir(exist_ok=True)
    own = (f"name={name}", f"runs_dir={runs}", *arguments)
    return slurm.submit(*own, options=[f"--nodes={nodes}", "--cpus-per-task=4", f"--output={runs}/%j.out"])


def local(runs: Path, name: str, *arguments: str) -> float:
    """The same command without Slurm. Returns: seconds until it had done its first step."""
    begun = time.time()
    command = [ROOT / "launch/local.sh", f"name={name}", f"runs_dir={runs}", *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return first_step_s(runs / name) - begun


def first_step_s(run: Path) -> float:
    """When the run had done step 1, in seconds since 1970."""
    for line in (run / "log" / "driver.log").read_text().splitlines():
        if re.search(r" step 1/\d+  ", line):
            return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    raise AssertionError(f"{run} has done no step")


def test_the_demo_on_two_nodes_gives_the_weights_of_one_machine(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(
        *(slurm, tmp_path, "nodes", *DEMO, "trainer.ranks_per_node=1", "rollout.engines=2", "rollout.ranks_per_node=1"),
        nodes=2,
    )
    job.wait_for_text("step 1/3", timeout_s=DEADLINE_S)
    titles = {name: slurm.titles(name) for name in ("node1", "node2")}

    assert job.end(timeout_s=DEADLINE_S) == "COMPLETED 0:0", job.output()
    for name, found in titles.items():  # of each node
        assert sum("ray::Worker" in title for title in found) == 1, (name, found)
        assert sum("ray::Server" in title for title in found) == 1, (name, found)
    assert [record["step"] for record in records(tmp_path / "nodes")] == [0, 1, 2, 3]
    local(tmp_path, "machine", *DEMO, "mode=train_only", f"samples={tmp_path / 'nodes' / 'samples.jsonl'}")
    assert differences(tmp_path / "nodes", tmp_path / "machine", step=3) == []


def test_a_stopped_run_resumes_behind_its_checkpoint_and_starting_it_costs_little(
    slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("experiment=cpu_digits", "mode=sft", "sft.steps=0", "steps=40", *SHORT)
    job = submit(slurm, tmp_path, "stopped", *arguments, "trainer.ranks_per_node=1", nodes=2)
    job.wait_for_text("step 3/40", timeout_s=DEADLINE_S)
    started_s = datetime.fromisoformat(job.fields()["StartTime"]).timestamp()

    slurm.run("scancel", "--signal=USR1", "--batch", job.number)

    (saved,) = job.wait_for(lambda: re.findall(r"step_(\d+) is saved", job.output()), what="it has saved")
    job.wait_for_text("requeued, to go on from")
    through_slurm_s = first_step_s(tmp_path / "stopped") - started_s
    assert job.end(timeout_s=DEADLINE_S) == "COMPLETED 0:0", job.output()
    assert [record["step"] for record in records(tmp_path / "stopped")] == list(range(1, 41))
    assert f"step {int(saved) + 1}/40" in (tmp_path / f"stopped/log/job-{job.number}-1/program.log").read_text()

    alone_s = local(tmp_path, "machine", *arguments)
    assert differences(tmp_path / "machine", tmp_path / "stopped", step=40) == []
    with capsys.disabled():
        print(f"\nuntil the first step: {through_slurm_s:.1f} s through Slurm on 2 nodes, {alone_s:.1f} s without")
    assert through_slurm_s - alone_s < OVERHEAD_S


def test_one_engine_over_two_of_three_nodes(slurm: Cluster, tmp_path: Path) -> None:
    engine = ("rollout.engines=1", "rollout.tp=2", "rollout.ranks_per_node=1")
    job = submit(slurm, tmp_path, "three", *DEMO, *engine, "steps=1", "trainer.ranks_per_node=1", nodes=3)
    job.wait_for_text("step 1/1", timeout_s=DEADLINE_S)
    parts = [sum("ray::Server" in title for title in slurm.titles(name)) for name in slurm.names]

    assert job.end(timeout_s=DEADLINE_S) == "COMPLETED 0:0", job.output()
    assert sorted(parts) == [0, 1, 1]
    (last,) = (record for record in records(tmp_path / "three") if record["step"] == 1)
    assert last["sync/bytes_received"] == last["sync/bytes_needed"] > 0
