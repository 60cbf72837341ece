"""Runs whose trainer and engines lie on several machines end as on one, bit for bit; failures name the machine."""

import json
import signal
from collections.abc import Callable

import pytest

from tests.nodes.bed import cut
from tests.nodes.conftest import STEPS, Cluster, Run, line
from tests.program.program import DONE, FAILED, finish
from tests.program.states import differences

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

Start = Callable[..., Run]
NOTICED_S = 30.0
"""From a death to the end of the run."""
TRAINER = ("trainer.ranks_per_node=1", "cluster.trainer_nodes=trainer")
PARTS = ("rollout.tp=2", "rollout.ranks_per_node=1", "cluster.rollout_nodes=rollout")
"""One engine on the second and the third machine."""


def assert_ends_as_on_one_machine(run: Run, cluster: Cluster) -> None:
    """Every byte went where it was needed, and training on the same samples here gives the same weights."""
    assert run.end() == DONE, run.text()
    assert run.left() == []
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert all(s["sync/bytes_received"] == s["sync/bytes_needed"] > 0 for s in steps[1:])
    assert all(s["mismatch/logprob_abs_diff_mean"] < 1e-5 for s in steps[1:])  # float32 on both sides
    assert any(s["grad_norm"] > 0 for s in steps[1:])

    replayed = cluster.path / f"{run.path.name}-replayed"
    samples = ("mode=train_only", f"samples={run.path}/samples.jsonl", f"name={replayed.name}")
    ended = finish([*cluster.settings, *samples], replayed.with_suffix(".out"))
    assert ended.code == DONE, ended.text
    assert differences(run.path, replayed, step=STEPS) == []


def test_trainer_and_engines_on_two_machines(cluster: Cluster, start: Start) -> None:
    engines = ("rollout.engines=2", "rollout.ranks_per_node=1", "cluster.rollout_nodes=pair")

    run = start("pair", *TRAINER, *engines, "weights.verify=true")

    run.wait_for("step 1/")
    for node in cluster.nodes[:2]:
        for title in ("ray::Worker", "ray::Server", "sglang::scheduler"):
            run.find(node, title)
    assert_ends_as_on_one_machine(run, cluster)


def test_an_engine_on_two_machines(cluster: Cluster, start: Start) -> None:
    run = start("parts", *TRAINER, *PARTS, "weights.verify=true")

    run.wait_for("step 1/")
    for node in cluster.nodes[1:]:
        run.find(node, "sglang::scheduler")
    assert_ends_as_on_one_machine(run, cluster)


def ends_soon(run: Run) -> str:
    """What it says, not later than NOTICED_S from now, and in one message."""
    assert run.end(within_s=NOTICED_S) == FAILED, run.text()
    assert "Traceback" not in run.text(), run.text()
    assert run.left() == []
    return run.text()[run.text().rfind("\nfailed: ") :]


def test_a_part_of_an_engine_that_dies_is_named(cluster: Cluster, start: Start) -> None:
    run = start("part-killed", "mode=rollout_only", "steps=1000", *PARTS)
    run.wait_for("step 2/")

    (node,) = (n for n in cluster.nodes[1:] if any("--node-rank 1" in line(p) for p in n.processes()))
    run.find(node, "sglang::scheduler").send_signal(signal.SIGKILL)

    named = f"failed: engine-0-part-1 on {node.name} ended: sglang::scheduler_TP1 is gone. Its log is "
    assert named in ends_soon(run)


def test_a_machine_that_is_lost_is_named(cluster: Cluster, start: Start) -> None:
    """The third, which the cluster lacks afterwards."""
    run = start("node-killed", "mode=rollout_only", "steps=1000", *PARTS)
    run.wait_for("step 2/")

    run.find(cluster.nodes[2], "raylet/raylet").send_signal(signal.SIGKILL)

    assert "node3 (10.78.0.3)" in ends_soon(run)


def test_a_machine_that_is_cut_off_is_named_before_ray_notices(cluster: Cluster, start: Start) -> None:
    """Last: the cluster is another machine short afterwards."""
    supervised = ("mode=sft", "sft.steps=0", "steps=100000", "checkpoint.every=0")
    run = start("cut", *supervised, "trainer.ranks_per_node=1", "cluster.trainer_nodes=pair")
    run.wait_for("step 1/")

    cut(cluster.nodes[1])

    assert run.end(within_s=NOTICED_S) == FAILED
    assert "failed: Update: lost node2 (10.78.0.2)" in run.text()
