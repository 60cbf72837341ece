"""How ranks are shared out over nodes, and where they are reached there."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from megatron_rl import cluster
from megatron_rl.arrangement import arrange, ranks_on_a_node, wrong_nodes
from megatron_rl.config import Config
from megatron_rl.config_loading import load_config
from megatron_rl.errors import BackendError, ConfigError
from megatron_rl.pools import (
    Pool,
    interface_of,
    own_address,
    rollout_pool,
    trainer_pool,
)


@pytest.mark.parametrize(
    ("ranks", "gpus", "group", "copies", "expected"),
    [
        (16, [8, 8], 4, 1, 8),
        (8, [8, 8], 1, 1, 8),
        (12, [8, 8], 4, 1, 4),  # 6 would cut a group of 4
        (12, [8, 8], 1, 1, 6),
        (16, [8, 8], 16, 1, 8),  # no node holds a whole group
        (12, [8, 4, 4], 2, 1, 4),  # one node holds 6, and the two others none
        (16, [0, 8, 8], 1, 1, 8),
        (8, [4, 4, 4, 4], 1, 2, 4),  # two engines of 8
        (4, [8, 8], 1, 4, 4),
        (4, [3, 3], 1, 1, 2),
        (4, [1, 1], 1, 1, 1),  # too few at all
    ],
)
def test_as_many_ranks_share_a_node_as_the_nodes_allow(
    ranks: int, gpus: list[int], group: int, copies: int, expected: int
) -> None:
    assert ranks_on_a_node(ranks, gpus=gpus, group=group, copies=copies) == expected


def asked(*overrides: str) -> Config:
    return load_config(["experiment=cpu_digits", *overrides])


def test_engines_lie_where_trainer_ranks_leave_room() -> None:
    config = asked("trainer.world_size=12", "parallel.tp=2", "rollout.tp=2", "rollout.engines=2", "cluster.nodes=2")

    ours, theirs = arrange(config)

    # 12 in halves of 6, and an engine on the 2 GPUs that each half leaves.
    assert ours == tuple((node, gpu) for node in (0, 1) for gpu in range(6))
    assert theirs == ((0, 6), (0, 7), (1, 6), (1, 7))
    assert list(wrong_nodes(config)) == []


def test_ranks_per_node_keeps_a_roles_runs_apart() -> None:
    sizes = ["trainer.world_size=4", "trainer.ranks_per_node=2", "rollout.tp=4", "rollout.ranks_per_node=2"]

    ours, theirs = arrange(asked(*sizes, "cluster.gpus_per_node=4"))

    assert ours == ((0, 0), (0, 1), (1, 0), (1, 1)) and theirs == ((0, 2), (0, 3), (1, 2), (1, 3))


def test_nodes_are_added_until_there_is_room_unless_they_are_counted() -> None:
    sizes = ["trainer.world_size=12", "parallel.tp=2", "rollout.tp=4"]

    ours, theirs = arrange(asked(*sizes))

    assert len({node for node, _ in (*ours, *theirs)}) == 3
    with pytest.raises(
        ConfigError, match=r"rollout needs 1 times 4 GPUs side by side, and 2 nodes of 8, with 12 taken"
    ):
        arrange(asked(*sizes, "cluster.nodes=2"))
    assert list(wrong_nodes(asked(*sizes, "cluster.nodes=2"))) and not list(wrong_nodes(asked(*sizes, "mode=sft")))


def test_roles_with_nodes_of_their_own_share_none() -> None:
    sizes = ["trainer.world_size=4", "rollout.engines=2", "rollout.tp=2"]
    marks = ["cluster.address=auto", "cluster.trainer_nodes=large", "cluster.rollout_nodes=small"]

    assert {node for side in arrange(asked(*sizes)) for node, _ in side} == {0}
    ours, theirs = arrange(asked(*sizes, *marks))

    assert {node for node, _ in ours} == {0} and {node for node, _ in theirs} == {1}
    (problem,) = wrong_nodes(asked(*sizes, *marks, "cluster.nodes=1"))
    assert "rollout needs 2 times 2 GPUs side by side, and 1 nodes of 8, with 8 taken, have no room" in problem


def test_without_a_cluster_nobody_outside_reaches_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # the tests below may have connected

    assert own_address() == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_of_another_machine_is_refused_with_the_mend() -> None:
    with pytest.raises(BackendError, match=r"192\.0\.2\.1, belongs to none.*--node-ip-address"):
        interface_of("192.0.2.1")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of three nodes with four CPUs each, of which two are marked."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=4, resources={"big": 1000})
        cluster.start(address=nodes.address, cpus=0)
        yield nodes.address
    finally:
        cluster.stop()
        nodes.shutdown()


def demo(address: str, *overrides: str) -> Config:
    return load_config(["experiment=cpu_digits", f"cluster.address={address}", *overrides])


def released(pool: Pool) -> list[str]:
    """The nodes of its places, which are given back."""
    nodes = pool.nodes()
    ray.util.remove_placement_group(pool.group)
    return nodes


@pytest.mark.live
def test_consecutive_ranks_share_a_node_which_has_no_others(address: str) -> None:
    settings = ["trainer.world_size=6", "parallel.ep=2", "trainer.ranks_per_node=2"]

    nodes = released(trainer_pool(demo(address, *settings)))

    assert nodes[0::2] == nodes[1::2]
    assert len(set(nodes)) == 3


@pytest.mark.live
def test_engines_lie_apart_and_large_ones_on_several_nodes(address: str) -> None:
    apart = released(rollout_pool(demo(address, "rollout.engines=3", "rollout.tp=2")))
    parts = released(
        rollout_pool(demo(address, "rollout.tp=2", "rollout.ranks_per_node=1", "cluster.rollout_nodes=big"))
    )

    assert len(set(apart)) == 3
    assert len(parts) == len(set(parts)) == 2
    marked = {node["NodeID"] for node in ray.nodes() if "big" in node["Resources"]}
    assert set(parts) == marked


@pytest.mark.live
def test_marked_nodes_take_all_of_a_role(address: str) -> None:
    nodes = released(trainer_pool(demo(address, "trainer.world_size=6", "cluster.trainer_nodes=big")))

    marked = {node["NodeID"] for node in ray.nodes() if "big" in node["Resources"]}
    assert set(nodes) == marked
    assert sorted(Counter(nodes).values()) == [2, 4]


class Process:
    """Says where it is."""

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


@pytest.mark.live
def test_processes_run_in_their_places(address: str, tmp_path: Path) -> None:
    pool = Pool("trainer", 4, cpus=1, together=2, strategy="STRICT_SPREAD")
    actors = [pool.spawn(Process, index=i, log=tmp_path / f"{i}.log") for i in range(4)]

    found = ray.get([actor.where.remote() for actor in actors])

    assert found == pool.nodes()
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(pool.group)


@pytest.mark.live
def test_nodes_that_are_missing_are_told_with_those_that_are_there(address: str) -> None:
    wanted = (
        r"trainer needs 4 x \{'CPU': 2, 'big': 0\.002\}, each on a node of its own.*4 CPU, 0 GPU, 1000 big.*Add nodes"
    )
    with pytest.raises(BackendError, match=wanted):
        Pool("trainer", 8, cpus=1, together=2, strategy="STRICT_SPREAD", nodes="big", timeout_s=1.0)
