"""Which process runs on which node, and where others reach it there.

Classes handed to `Pool.spawn` are plain; their standard output goes to a log file of their own.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl import cluster
from megatron_rl.arrangement import rollout_together, trainer_together
from megatron_rl.config import Config
from megatron_rl.errors import BackendError

LOOPBACK = "127.0.0.1"
SHARE = 0.001
"""Of the resource that marks a role's nodes: no node runs out of it."""


def trainer_pool(config: Config) -> "Pool":
    """A place for each trainer rank; where there are GPUs, as many ranks side by side as a node has."""
    ranks, asked, nodes = config.trainer.world_size, config.trainer.ranks_per_node, config.cluster.trainer_nodes
    gpus = has_gpus()
    together = trainer_together(config, _gpus(nodes)) if gpus else asked or 1
    strategy = "STRICT_SPREAD" if asked else "PACK"
    return Pool("trainer", ranks, cpus=1, gpus=int(gpus), together=together, strategy=strategy, nodes=nodes)


def rollout_pool(config: Config) -> "Pool":
    """A place for each engine; for each of an engine's parts, engine after engine, where one node does not hold it."""
    r, nodes, gpus = config.rollout, config.cluster.rollout_nodes, has_gpus()
    together = rollout_together(config, _gpus(nodes)) if gpus else r.ranks_per_node or r.tp
    part = min(together, r.tp)
    return Pool(
        "rollout",
        r.engines * r.tp // part,
        cpus=part,
        gpus=part * gpus,
        together=together // part,
        strategy="STRICT_SPREAD" if r.ranks_per_node else "SPREAD",
        nodes=nodes,
    )


def has_gpus() -> bool:
    """Whether any node offers one."""
    return ray.cluster_resources().get("GPU", 0) > 0


def _gpus(nodes: str | None) -> list[int]:
    """Of each node that offers the resource `nodes`, or of all."""
    offers = [node["Resources"] for node in _alive()]
    return [int(offer.get("GPU", 0)) for offer in offers if nodes is None or nodes in offer]


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def own_address() -> str:
    """Where the run's other processes reach this one: open to no other machine when there is none in the cluster."""
    if not ray.is_initialized() or len(_alive()) == 1:
        return LOOPBACK
    return str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str:
    """Name of the network interface that has `address`. Raises: BackendError when none has."""
    found = {a.address: name for name, addresses in psutil.net_if_addrs().items() for a in addresses}
    if address not in found:
        raise BackendError(
            f"Ray's address of this node, {address}, belongs to none of its network interfaces ({', '.join(found)}). "
            "Start Ray there with --node-ip-address=ADDRESS, one that the other nodes reach."
        )
    return found[address]


class Pool:
    """Resources of one role, reserved at once: a place with `cpus` and `gpus` for each of `count` processes."""

    def __init__(
        self,
        role: str,
        count: int,
        *,
        cpus: int,
        gpus: int = 0,
        together: int = 1,
        strategy: str = "PACK",
        nodes: str | None = None,
        timeout_s: float = 120.0,
    ):
        """Every `together` processes in order share a node; `strategy` is Ray's for where the nodes of these lie.

        nodes: a resource that only the nodes to be used offer.
        Raises: BackendError when the cluster does not have the places within `timeout_s`; it says what there is.
        """
        self.role, self.cpus, self.gpus, self._together = role, cpus, gpus, together
        wanted: dict[str, float] = {"CPU": cpus, "GPU": gpus, **({nodes: SHARE} if nodes else {})}
        bundle = {name: amount * together for name, amount in wanted.items() if amount}
        self.group = placement_group([bundle] * (count // together), strategy=strategy)
        if not self.group.wait(timeout_s):
            apart = ", each on a node of its own" if strategy == "STRICT_SPREAD" else ""
            offers = "; ".join(f"{_name(node)}: {_offer(node, nodes)}" for node in _alive())
            raise BackendError(
                f"{role} needs {count // together} x {bundle}{apart}, and the cluster did not offer it within "
                f"{timeout_s:.0f} s. Nodes: {offers}. Add nodes, or lower the number of {role} processes."
            )
        cluster.watch(self.nodes())

    def nodes(self) -> list[str]:
        """Ray's name of the node that each process's place lies on."""
        where: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return [where[i] for i in range(len(where)) for _ in range(self._together)]

    def spawn(self, cls: type, *args: Any, index: int, log: Path, concurrency: int = 1) -> Any:
        """Start `cls(*args)` as an actor in place `index`; its stdout and stderr go to `log`."""
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index // self._together)
        remote = ray.remote(_logged(cls)).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_concurrency=concurrency, scheduling_strategy=place
        )
        return remote.remote(str(log), *args)


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _offer(node: dict[str, Any], label: str | None) -> str:
    names = ["CPU", "GPU", *([label] if label else [])]
    return ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in names)


def _see_all_gpus() -> None:
    """The own GPUs stay the first; the node's others are seen too, whose memory weights are read from.

    Ray shows a process its own only. Not yet run on a GPU.
    """
    own = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.isdigit()]
    here = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    if own:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*own, *(number for number in here if number not in own)])


def _meet_where_ray_does() -> None:
    """gloo would listen where the DNS, or /etc/hosts, says that this machine is, which others need not reach.

    NCCL chooses well inside a node. What the user says counts.
    """
    address = own_address()
    for library in ("GLOO",) if address == LOOPBACK else ("GLOO", "NCCL"):
        if f"{library}_SOCKET_IFNAME" not in os.environ:
            os.environ[f"{library}_SOCKET_IFNAME"] = interface_of(address)


def _logged(cls: type) -> type:
    """`cls` whose first constructor argument is the file that takes over its process's output."""

    class Logged(cls):  # type: ignore[misc, valid-type]
        def __init__(self, log_path: str, *args: Any):
            descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(descriptor, stream.fileno())
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
            _see_all_gpus()
            _meet_where_ray_does()
            super().__init__(*args)

    Logged.__name__ = Logged.__qualname__ = cls.__name__
    return Logged
