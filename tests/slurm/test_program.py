"""The program itself over several nodes ends as on one machine, bit for bit; what is lost there is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program.states import differences, records
from tests.slurm.slurm import LOST_S, Job, Slurm, run_here

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

Submit = Callable[..., Job]
STEPS = 3
DEMO = (
    *("prompts_per_step=8", "algorithm.lr=1e-3", "sampling.max_tokens=3", "data.held_out=8", "weights.verify=true"),
    *("sft.steps=30", "sft.warmup_steps=0", "sft.lr=3e-3", "sft.prompts_per_step=8"),
)
"""The demo, cut short, with prompts that are soon learnt."""
ENGINE = ("rollout.tp=2", "rollout.ranks_per_node=1")
"""On two nodes."""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{i:02d}=", "answer": str(i % 10)}) for i in range(100)]
    path.write_text("\n".join(lines) + "\n")
    return f"data.path={path}"


def ends_as_on_one_machine(job: Job, runs: Path, prompts: str) -> None:
    """Every byte went where it was needed, and training on the same samples here gives the same weights."""
    assert job.end() == "COMPLETED 0:0", job.output()
    run = runs / "run"
    steps = records(run)
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert all(s["sync/bytes_received"] == s["sync/bytes_needed"] > 0 for s in steps[1:])
    assert all(s["mismatch/logprob_abs_diff_mean"] < 1e-5 for s in steps[1:])  # float32 on both sides
    assert any(s["grad_norm"] > 0 for s in steps[1:])

    samples = ("mode=train_only", f"samples='{run}/samples.jsonl'")
    run_here(runs, "replayed", *DEMO, prompts, f"steps={STEPS}", "algorithm.warmup_steps=0", *samples)
    assert differences(run, runs / "replayed", step=STEPS) == []
    job.leaves_nothing()


def titles(slurm: Slurm, job: Job) -> list[tuple[int, int]]:
    """Trainer ranks and engine processes on each node, when the job trains."""
    job.wait_for_text("step 1/")
    found = [slurm.machines.titles(name) for name in slurm.names]
    return [
        (sum("ray::Worker" in title for title in here), sum(title.startswith("sglang::schedul") for title in here))
        for here in found
    ]


def test_trainer_and_engines_on_two_nodes(slurm: Slurm, submit: Submit, tmp_path: Path, prompts: str) -> None:
    """In an environment with a proxy that leads out of the cluster."""
    spread = ("trainer.ranks_per_node=1", "rollout.engines=2", "rollout.ranks_per_node=1")

    job = submit(
        "--nodelist=node1,node2",
        driver=None,
        steps=STEPS,
        more=(*DEMO, prompts, *spread),
        http_proxy="http://192.0.2.1:1",
    )

    assert titles(slurm, job) == [(1, 1), (1, 1), (0, 0)]
    ends_as_on_one_machine(job, tmp_path / "my runs", prompts)


def test_an_engine_over_two_of_three_nodes(slurm: Slurm, submit: Submit, tmp_path: Path, prompts: str) -> None:
    more = (*DEMO, prompts, "rollout.engines=1", *ENGINE)

    job = submit("--nodes=3", driver=None, steps=STEPS, more=more, MRL_ROLLOUT_CONSTRAINT="large")

    assert titles(slurm, job) == [(2, 0), (0, 1), (0, 1)]
    ends_as_on_one_machine(job, tmp_path / "my runs", prompts)


def test_a_part_of_an_engine_that_dies_is_named(slurm: Slurm, submit: Submit) -> None:
    more = ("mode=rollout_only", "rollout.engines=1", *ENGINE)
    job = submit("--nodelist=node1,node2", driver=None, steps=1000, more=more)
    job.wait_for_text("step 2/")

    (name,) = (n for n in slurm.names if any("--node-rank 1" in title for title in slurm.machines.titles(n)))
    slurm.machines.process(name, "sglang::schedul").kill()

    assert job.end(timeout_s=LOST_S) == "FAILED 1:0", job.output()
    named = f"failed: engine-0-part-1 on {name} ended: sglang::scheduler_TP1 is gone. Its log is "
    assert named in job.output()
    job.leaves_nothing()


@pytest.mark.parametrize("how", ["Ray ends", "cut off"])
def test_a_node_that_is_lost_is_named_by_program_and_job(slurm: Slurm, submit: Submit, how: str) -> None:
    """Where it is cut off, before Ray notices."""
    supervised = ("mode=sft", "sft.steps=0", "checkpoint.every=0", "trainer.ranks_per_node=1")
    job = submit("--nodelist=node1,node3", driver=None, steps=100_000, more=supervised)
    job.wait_for_text("step 1/")

    if how == "cut off":
        slurm.machines.cut("node3")
    else:
        slurm.machines.process("node3", "raylet").kill()

    job.wait_for(job.recorded, what="Slurm has recorded its end", timeout_s=LOST_S)
    assert re.fullmatch(r"FAILED [1-9]\d*:0", job.recorded())
    assert "lost node3; see ray-node3.log" in job.output()
    assert "failed: Update: lost node3 (10.77.0.3)" in job.output()
    if how == "cut off":
        slurm.machines.off("node3")
    job.leaves_nothing()
