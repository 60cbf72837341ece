"""Whether ranks can be shared out over nodes as asked. Pure; `placement.py` does it."""

from collections.abc import Iterator

from megatron_rl.config import Config


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


def _roles(config: Config) -> list[str]:
    """Who runs in this mode."""
    return {"train": ["trainer", "rollout"], "rollout_only": ["rollout"]}.get(config.mode, ["trainer"])
