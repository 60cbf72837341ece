"""What cannot work, found before anything starts: config and model together. Pure: no process, no torch, no backend."""

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.arrangement import cpus_needed, gpus_needed, wrong_nodes
from megatron_rl.config import AlgorithmConfig, Config
from megatron_rl.errors import ConfigError, LayoutError
from megatron_rl.formats.hf_files import read_hf_config
from megatron_rl.formats.torch_dist import is_torch_dist
from megatron_rl.layouts.compile import check_megatron, check_sglang
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.layouts.table import Table
from megatron_rl.megatron_options import set_elsewhere, wrong_options
from megatron_rl.memory import too_large, uses
from megatron_rl.models import load_architecture, load_table
from megatron_rl.rewards import REWARDS


def topology_of(config: Config, table: Table) -> MegatronTopology:
    """The trainer's ranks. Raises: LayoutError for an impossible cut."""
    p = config.parallel
    return MegatronTopology(
        world_size=config.trainer.world_size,
        num_layers=table.num_layers,
        mtp_layers=table.mtp_layers,
        tp=p.tp,
        pp=p.pp,
        vpp=p.vpp,
        cp=p.cp,
        ep=p.ep,
        etp=p.etp,
        first_stage_layers=p.first_stage_layers,
        last_stage_layers=p.last_stage_layers,
        account_for_embedding=p.account_for_embedding,
        account_for_loss=p.account_for_loss,
        pipeline_layout=p.pipeline_layout,
    )


def engine_of(config: Config) -> SglangTopology:
    """An engine's ranks. Raises: LayoutError for an impossible cut."""
    r = config.rollout
    return SglangTopology(
        tp=r.tp, ep=r.ep, dp_attention=r.dp_attention, dp_lm_head=r.dp_lm_head, moe_dense_tp=r.moe_dense_tp
    )


def check(config: Config) -> None:
    """Raises: ConfigError with every problem found, each with its mend."""
    problems = [*_settings(config), *wrong_nodes(config), *_without_effect(config), *_model(config)]
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  - " + "\n  - ".join(problems))


def _settings(config: Config) -> Iterator[str]:
    """Across sections, whatever the model."""
    p, per_rank = config.parallel, config.trainer.tokens_per_micro_batch
    has_engines, has_policy = config.mode in ("train", "rollout_only"), config.mode in ("train", "train_only")
    for key, value in {
        "prompts_per_step": config.prompts_per_step,
        "sampling.max_tokens": config.sampling.max_tokens,
    }.items():
        if config.mode != "sft" and value == 0:
            yield f"mode={config.mode} needs {key}, which is not set. Set it to at least 1."
    if has_policy and config.sampling.max_tokens >= per_rank * p.cp:
        yield (
            f"sampling.max_tokens={config.sampling.max_tokens} with trainer.tokens_per_micro_batch={per_rank} on "
            f"each of {p.cp} context-parallel rank(s): a whole sample has to fit one micro-batch. Raise the latter."
        )
    samples = config.prompts_per_step * config.sampling.samples_per_prompt
    dp = max(config.trainer.world_size // (p.pp * p.cp * p.tp), 1)
    if has_policy and samples < dp * config.algorithm.mini_batches:
        yield (
            f"prompts_per_step x sampling.samples_per_prompt = {samples} samples cannot fill algorithm.mini_batches="
            f"{config.algorithm.mini_batches} on {dp} data-parallel ranks. Raise prompts_per_step."
        )
    supervised = {"sft": config.steps, "rollout_only": 0}.get(config.mode, config.sft.steps)
    if supervised and config.sft.prompts_per_step < dp:
        yield (
            f"sft.prompts_per_step={config.sft.prompts_per_step} is less than the {dp} data-parallel ranks. Raise it."
        )
    if supervised and config.sft.lr == 0:
        yield f"sft.lr=0 with {supervised} supervised updates: nothing would be learned. Set sft.lr, as to 1e-5."
    phases = (
        ("algorithm", config.algorithm.warmup_steps, config.steps * config.algorithm.mini_batches * has_policy),
        ("sft", config.sft.warmup_steps, supervised),
    )
    for name, warmup_steps, updates in phases:
        if 0 < updates <= warmup_steps:
            yield (
                f"{name}.warmup_steps={warmup_steps} of {updates} optimizer steps leaves none at the full "
                f"learning rate. Set it below {updates}."
            )
    if has_engines and config.rollout.max_total_tokens <= config.sampling.max_tokens:
        yield (
            f"rollout.max_total_tokens={config.rollout.max_total_tokens} does not hold one answer of "
            f"sampling.max_tokens={config.sampling.max_tokens}. Raise rollout.max_total_tokens."
        )
    if config.mode == "train" and config.algorithm.recipe == "grpo" and config.sampling.samples_per_prompt < 2:
        yield (
            "sampling.samples_per_prompt=1: a group baseline needs at least 2 samples of each prompt. "
            "Set sampling.samples_per_prompt to 2 or more."
        )
    if config.reward.name == "verifier" and config.data.source != "reasoning_gym":
        yield (
            f"reward.name=verifier with data.source={config.data.source}: only reasoning_gym's tasks bring their own "
            "verifier. Set reward.name=exact or math."
        )
    if (config.reward.name or has_engines) and config.reward.name not in REWARDS:
        yield f"reward.name={config.reward.name!r} is not one of {', '.join(REWARDS)}. Set it to one of them."
    if config.samples is not None and not Path(config.samples).is_file():
        yield f"samples={config.samples} is not a file. Name the samples.jsonl of an earlier run."
    if config.mode == "sft" and config.sft.steps:
        yield (
            f"mode=sft with sft.steps={config.sft.steps}: the whole run is supervised, for `steps` updates, so a warm "
            "start before it has no effect. Set sft.steps=0."
        )
    if p.tp > 1 and not p.sp:
        yield (
            f"parallel.tp={p.tp} with parallel.sp=false: megatron-core refuses experts under tensor parallelism "
            "without sequence parallelism. Set parallel.sp=true."
        )
    if config.rollout.fp8 and config.mode != "train":
        yield (
            f"rollout.fp8=true with mode={config.mode}: engines get FP8 weights from a trainer, and this mode does not "
            "have both. Set rollout.fp8=false."
        )
    if p.sp and p.tp == 1:
        yield "parallel.sp=true with parallel.tp=1 has no effect. Set parallel.sp=false, or raise parallel.tp."


def _without_effect(config: Config) -> Iterator[str]:
    """Keys that nothing would read, or that would hold the run up."""
    data, cluster = config.data, config.cluster
    if data.source == "jsonl":
        for name in ("task", "task_options"):
            if value := getattr(data, name):
                yield (
                    f"data.{name}={value} with data.source=jsonl has no effect: tasks are reasoning_gym's. Remove it, "
                    "or set data.source=reasoning_gym."
                )
    elif data.path is not None:
        yield (
            f"data.path={data.path} with data.source={data.source} has no effect: its prompts are generated. Set "
            "data.path=null, or data.source=jsonl."
        )
    if config.mode == "train" and config.evaluation.every > 0 and data.held_out == 0:
        yield (
            f"evaluation.every={config.evaluation.every} with data.held_out=0: there are no held-out prompts to "
            "evaluate on. Raise data.held_out, or set evaluation.every=0."
        )
    if config.algorithm.mini_batches == 1:
        usual = AlgorithmConfig(lr=0.0)
        for name in ("clip_low", "clip_high"):
            if (value := getattr(config.algorithm, name)) != getattr(usual, name):
                yield (
                    f"algorithm.{name}={value} with algorithm.mini_batches=1 has no effect: every sample trains the "
                    "weights that it was sampled with, whose ratio is 1. Raise algorithm.mini_batches, or leave it out."
                )
    if cluster.cpus is None:
        return
    if cluster.address is not None:
        yield (
            f"cluster.cpus={cluster.cpus} with cluster.address={cluster.address} has no effect: that cluster runs "
            "already, with its own. Remove cluster.cpus."
        )
    elif cluster.cpus < (needed := cpus_needed(config)):
        yield (
            f"cluster.cpus={cluster.cpus} is less than the {needed} that the processes need (one a trainer rank, one a "
            f"rank of each engine, one for rewards): they would wait for it in vain. Set it to {needed} or null."
        )


def longest_prompt(config: Config, *, context: int) -> int:
    """Prompt tokens that leave room for an answer in the model's context, a micro-batch and the engine's cache."""
    answer = config.sampling.max_tokens
    longest = context - answer
    if config.mode != "rollout_only":
        longest = min(longest, config.trainer.tokens_per_micro_batch * config.parallel.cp - answer)
    if config.mode in ("train", "rollout_only"):
        longest = min(longest, config.rollout.longest_prompt(context, answer))
    return longest


def longest_demonstration(config: Config, *, context: int) -> int | None:
    """Tokens of a prompt with its answer that supervised updates have room for; None when there are none of those."""
    if config.mode != "sft" and (config.sft.steps == 0 or config.mode == "rollout_only"):
        return None
    return min(context, config.trainer.tokens_per_micro_batch * config.parallel.cp)


def _model(config: Config) -> Iterator[str]:
    """Whether the model exists and can be cut as asked, on both sides."""
    try:
        if config.model.path is None:
            hf = {"vocab_size": 1, **config.model.random}  # the tokenizer, made later, says how many there are
        else:
            hf = read_hf_config(Path(config.model.path))
        table = load_table(hf)
        architecture = load_architecture(hf)
    except ConfigError as error:
        yield str(error)
        return
    owners = set_elsewhere(architecture.megatron, config.parallel)
    yield from wrong_options(config.trainer.megatron, owners, mla=architecture.mla)
    context = architecture.max_position_embeddings
    if config.sampling.max_tokens >= context:
        yield (
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in the model's context of "
            f"{context}. Lower sampling.max_tokens."
        )
    gpus = gpus_needed(config)
    trainer = engine = None
    if gpus[0]:
        try:
            trainer = topology_of(config, table)
            check_megatron(table, trainer)
        except LayoutError as error:
            yield str(error)
            trainer = None
    if gpus[1]:
        try:
            engine = engine_of(config)
            check_sglang(table, engine, quantized=config.rollout.fp8)
        except LayoutError as error:
            yield str(error)
            engine = None
    if config.cluster.gpu_gb is not None and (trainer or engine):
        found = uses(config, table, architecture.megatron, trainer=trainer, engine=engine)
        yield from too_large(found, config.cluster.gpu_gb)
    yield from _weights(config)


def _weights(config: Config) -> Iterator[str]:
    """Whether there are weights to start from."""
    if config.model.path is None:
        return
    path = Path(config.model.path)
    if is_torch_dist(path) and config.mode == "rollout_only":
        yield (
            f"{path} is a converted checkpoint, and mode=rollout_only has no trainer to read it: engines start from "
            f"Hugging Face weights. Write them: python tools/convert export --checkpoint {path} --out DIR"
        )
    elif not is_torch_dist(path) and not any(path.glob("*.safetensors")):
        yield (
            f"{path} has a config.json and no weights, neither *.safetensors nor what tools/convert writes. Set "
            "model.path to a whole Hugging Face checkpoint in safetensors format, or to a converted one."
        )
