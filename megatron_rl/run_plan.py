"""What a run would take, before it is queued: GPUs and nodes, memory on each GPU, bytes of a weight sync."""

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.arrangement import arrange, cpus_of_node, gpus_needed
from megatron_rl.checks import engine_of, topology_of
from megatron_rl.config import Config
from megatron_rl.convert.fp8 import without_quantization
from megatron_rl.formats.hf_files import read_hf_config
from megatron_rl.memory import Use, uses
from megatron_rl.models import load_architecture, load_table
from megatron_rl.resharding.schedule import make_schedule
from megatron_rl.resharding.spec import BUCKET_BYTES, Placement, SyncSpec
from megatron_rl.resharding.traffic import Traffic, measure
from megatron_rl.rollout.options import streamed


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Of one run, on GPUs."""

    trainer_gpus: int
    engine_gpus: int
    """Of all engines."""
    nodes: int
    uses: dict[str, Use]
    """Memory of each kind of rank."""
    layers: dict[str, str]
    """Of the trainer's pipeline stages, under the same names: which layers each holds."""
    sync: Traffic | None
    """None where nothing is synced, or it was not asked for."""


def plan_run(config: Config, *, with_sync: bool = True) -> RunPlan:
    """No weights are needed, only config.json. A sync of a thousand ranks takes seconds to plan.

    Raises: ConfigError or LayoutError for a model or a layout that cannot be.
    """
    hf = config.model.random if config.model.path is None else read_hf_config(Path(config.model.path))
    hf = {"vocab_size": 1, **without_quantization(hf)}  # a random model's tokenizer says later how many there are
    table, architecture = load_table(hf), load_architecture(hf)
    gpus = gpus_needed(config)
    trainer = topology_of(config, table) if gpus[0] else None
    engine = engine_of(config) if gpus[1] else None
    places = arrange(config)
    layers, sync = {}, None
    if trainer is not None:
        layers = {f"trainer, stage {stage}": held for stage, held in enumerate(trainer.stage_layers())}
    if with_sync and trainer is not None and engine is not None:
        spec = SyncSpec(
            hf,
            trainer,
            engine,
            trainer_dtype=config.trainer.dtype,
            engine_dtype=config.rollout.dtype,
            engines=config.rollout.engines,
            bucket_bytes=BUCKET_BYTES["cuda"],
            direct=not streamed(config.rollout.sglang),
            fp8=config.rollout.fp8,
            placement=Placement(*places),
        )
        sync = measure(make_schedule(spec))
    memory = uses(config, table, architecture.megatron, trainer=trainer, engine=engine)
    return RunPlan(*gpus, len({node for side in places for node, _ in side}), memory, layers, sync)


def describe(config: Config, plan: RunPlan) -> str:
    """Lines of figures. GB are 10^9 bytes."""
    p, r, per_node = config.parallel, config.rollout, config.cluster.gpus_per_node
    nodes = f"{plan.nodes} node{'s' * (plan.nodes > 1)} of {per_node}"
    lines = [f"GPUs     {plan.trainer_gpus} for the trainer and {plan.engine_gpus} for engines, on {nodes}"]
    if config.cluster.nodes is not None:
        cpus = cpus_of_node(per_node)
        lines.append(f"sbatch   --nodes={plan.nodes} --gpus-per-node={per_node} --cpus-per-task={cpus} (at least)")
    if plan.trainer_gpus:
        lines.append("trainer  " + _sizes(tp=p.tp, pp=p.pp, vpp=p.vpp, cp=p.cp, ep=p.ep, etp=p.etp))
    if plan.engine_gpus:
        lines.append("engines  " + _sizes(engines=r.engines, tp=r.tp, ep=r.ep, dp_attention=r.dp_attention))
    if plan.sync is not None:
        lines.append("sync     " + _traffic(plan.sync))
    return "\n".join([*lines, "", *_memory(plan), *_fit(config, plan)])


def _sizes(**sizes: int | None) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)


def _traffic(sync: Traffic) -> str:
    network, near = sync.sent.sum() / 1e9, sync.in_node.sum() / 1e9
    most = f"at most {sync.sent.max() / 1e9:.2f} GB out of a GPU and {sync.fetched.max() / 1e9:.2f} GB into one"
    return f"{network:.1f} GB over the network, {most}; {near:.1f} GB inside nodes"


def _memory(plan: RunPlan) -> list[str]:
    """A table: a row for each kind of rank."""
    columns = list(dict.fromkeys(name for use in plan.uses.values() for name, nbytes in use.items() if nbytes))
    rows = [["GB on each GPU", "layers", *columns, "sum"]]
    for who, use in plan.uses.items():
        figures = [f"{use[name] / 1e9:.1f}" if use.get(name) else "" for name in columns]
        rows.append([who, plan.layers.get(who, ""), *figures, f"{sum(use.values()) / 1e9:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _fit(config: Config, plan: RunPlan) -> list[str]:
    who, use = max(plan.uses.items(), key=lambda pair: sum(pair[1].values()))
    needed, there = sum(use.values()) / 1e9, config.cluster.gpu_gb
    if there is None:
        return [f"most: {who}, {needed:.1f} GB. With cluster=8xh100, say, this is compared with what there is."]
    share = f"{needed:.1f} of {there:g} GB ({needed / there:.0%})"
    return [f"most: {who}, {share}" + ("" if needed <= there else ": most likely it runs out of memory")]
