"""How ranks are shared out over nodes, and whether they can be as asked. Pure; `pools.py` has Ray do it."""

from collections.abc import Iterator, Sequence

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError

OBJECT_STORE_BYTES = 1_000_000_000
"""Of Ray, on each node: a step's token arrays; it spills to disk beyond."""
Places = tuple[tuple[int, int], ...]
"""(node, GPU of the node) of each rank."""


def cpus_needed(config: Config) -> int:
    """What the processes of `config.mode` ask Ray for: trainer ranks, and the engines' ranks with one for rewards."""
    ranks, engine_ranks = gpus_needed(config)
    return ranks + (engine_ranks + 1 if engine_ranks else 0)


def gpus_needed(config: Config) -> tuple[int, int]:
    """(GPUs of the trainer, those of all engines) in `config.mode`, where there are GPUs: each rank has one."""
    rollout, roles = config.rollout, _roles(config)
    return config.trainer.world_size * ("trainer" in roles), rollout.engines * rollout.tp * ("rollout" in roles)


def wrong_nodes(config: Config) -> Iterator[str]:
    """What is wrong with ranks_per_node and marked nodes, each with the mend."""
    trainer, rollout, cluster = config.trainer, config.rollout, config.cluster
    roles = {
        "trainer": (trainer.ranks_per_node, trainer.world_size, config.parallel.tp, cluster.trainer_nodes),
        "rollout": (rollout.ranks_per_node, rollout.engines * rollout.tp, rollout.tp, cluster.rollout_nodes),
    }
    for role in _roles(config):
        each, count, group, marked = roles[role]
        fitting = [k for k in range(1, count + 1) if count % k == 0 and 0 in (k % group, group % k)]
        if each and each not in fitting:
            yield (
                f"{role}.ranks_per_node={each} does not share out {count} ranks in tensor-parallel groups of {group} "
                f"evenly. Set it to one of {', '.join(map(str, fitting))}, or to null."
            )
        alone = "with cluster.address=null, which starts Ray on this machine alone"
        if each and each < count and cluster.address is None:
            yield f"{role}.ranks_per_node={each} {alone}: it needs {count // each} nodes. Set cluster.address too."
        if marked and cluster.address is None:
            yield f"cluster.{role}_nodes={marked} {alone}: no node offers it. Set cluster.address too."
    yield from _no_room(config)


def _no_room(config: Config) -> Iterator[str]:
    """Whether the ranks find GPUs on the nodes that the config promises."""
    if config.cluster.nodes is not None:
        try:
            arrange(config)
        except ConfigError as error:
            yield str(error)


def ranks_on_a_node(ranks: int, *, gpus: Sequence[int], group: int = 1, copies: int = 1) -> int:
    """The largest divisor of `ranks` of which nodes with so many `gpus` each hold enough for `copies` times all ranks.

    Whole groups of `group` ranks go before. 1 when the nodes have too few GPUs.
    """
    divisors = [k for k in range(ranks, 0, -1) if ranks % k == 0]
    whole = [k for k in divisors if k % group == 0]
    fitting = (k for k in (*whole, *divisors) if k * sum(n // k for n in gpus) >= ranks * copies)
    return next(fitting, 1)


def trainer_together(config: Config, gpus: Sequence[int]) -> int:
    """Trainer ranks that share a node, of nodes with so many GPUs each."""
    t = config.trainer
    return t.ranks_per_node or ranks_on_a_node(t.world_size, gpus=gpus, group=config.parallel.tp)


def rollout_together(config: Config, gpus: Sequence[int]) -> int:
    """Engine ranks that share a node, of nodes with so many GPUs each."""
    r = config.rollout
    return r.ranks_per_node or ranks_on_a_node(r.tp, gpus=gpus, copies=r.engines)


def cpus_of_node(gpus: int) -> int:
    """The fewest with which a node of so many GPUs can be used whole: Ray counts one a rank, and one for rewards."""
    return gpus + 1


def arrange(config: Config) -> tuple[Places, Places]:
    """Where trainer ranks and the ranks of all engines lie on equal nodes with GPUs: what `pools.py` asks Ray for.

    Raises: ConfigError when cluster.nodes nodes have no room for them; with null, they are as many as it takes.
    """
    ranks = gpus_needed(config)
    nodes = config.cluster.nodes or -(-sum(ranks) // config.cluster.gpus_per_node)
    try:
        return _arrange(config, ranks, [config.cluster.gpus_per_node] * nodes)
    except ConfigError:
        if config.cluster.nodes is not None:
            raise
        return _arrange(config, ranks, [config.cluster.gpus_per_node] * sum(ranks))


def _arrange(config: Config, ranks: tuple[int, int], gpus: list[int]) -> tuple[Places, Places]:
    trainer, rollout, used = config.trainer, config.rollout, [0] * len(gpus)
    together = trainer_together(config, gpus)
    ours = _fill(used, gpus, "trainer", ranks[0], together, apart=trainer.ranks_per_node is not None)
    marks = {config.cluster.trainer_nodes, config.cluster.rollout_nodes}
    if None not in marks and len(marks) == 2:  # each role has nodes of its own
        used = [gpus[i] if n else 0 for i, n in enumerate(used)]
    together = rollout_together(config, gpus)
    return ours, _fill(used, gpus, "rollout", ranks[1], together, apart=rollout.ranks_per_node is not None)


def _fill(used: list[int], gpus: list[int], role: str, ranks: int, together: int, *, apart: bool) -> Places:
    """Take GPUs for runs of `together` ranks, each on one node, and `apart` on one that has no other of the role."""
    places: list[tuple[int, int]] = []
    for _ in range(ranks // together):
        mine = {node for node, _ in places} if apart else set()
        fitting = (i for i, n in enumerate(used) if n + together <= gpus[i] and i not in mine)
        node = next(fitting, None)
        if node is None:
            raise ConfigError(
                f"{role} needs {ranks // together} times {together} GPUs side by side, and {len(used)} nodes of "
                f"{gpus[0]}, with {sum(used)} taken, have no room: ranks would wait in vain. Raise cluster.nodes, or "
                f"set {role}.ranks_per_node."
            )
        places += [(node, used[node] + i) for i in range(together)]
        used[node] += together
    return tuple(places)


def _roles(config: Config) -> list[str]:
    """Who runs in this mode."""
    return {"train": ["trainer", "rollout"], "rollout_only": ["rollout"]}.get(config.mode, ["trainer"])
