"""The config schema, one dataclass per section; config_loading.py fills it.

Checks of one section stand in its `__post_init__`; checks across sections or against the model are in `checks.py`.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.errors import ConfigError

SEEDS = 2**32


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}={value!r} is not one of {', '.join(choices)}.{hint}")


def _at_least(key: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}.")


def _check_numbers(section: Any, prefix: str = "") -> None:
    """What holds of every number of its kind: NaN compares with nothing, so no check of a range would see it."""
    for f in dataclasses.fields(section):
        key, value = prefix + f.name, getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            _check_numbers(value, f"{key}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value} is no finite number, and nothing could be computed with it. Write one.")
        elif f.name.endswith("timeout_s") and value <= 0:
            raise ConfigError(f"{key}={value} leaves no time for what is waited for. Set it above 0.")
        elif f.name == "seed" and not 0 <= value < SEEDS:
            raise ConfigError(f"{key}={value}: the libraries that it seeds take 0 to {SEEDS - 1}. Set one of these.")


@dataclass
class ModelConfig:
    """Where the starting weights come from: a checkpoint, or a random model built in the run directory."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint (config, safetensors, tokenizer)."""
    random: dict[str, Any] = field(default_factory=dict)
    """Used when `path` is null: a Hugging Face config.json as a mapping, built with random weights and a tokenizer
    that knows the characters of the data set."""

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.random):
            raise ConfigError(
                f"model.path={self.path} and model.random with {len(self.random)} entries: exactly one says where the "
                "weights come from. For a checkpoint write model=hf model.path=DIR."
            )


@dataclass
class DataConfig:
    """Prompts and their held-out part."""

    source: str
    """`jsonl` (a file of {"prompt", "answer"} objects) or "reasoning_gym" (generated, with its own verifier)."""
    path: str | None = None
    """The file, for source=jsonl."""
    task: str | None = None
    """Data set name, for source=reasoning_gym."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Options of the reasoning_gym data set."""
    size: int = 10_000
    """Prompts generated, for source=reasoning_gym; duplicates are removed."""
    seed: int = 0
    """Seeds generation, the held-out split and the order of prompts."""
    held_out: int = 512
    """Distinct prompts set aside for evaluation; they never train."""
    template: str = "{prompt}"
    """Text around each prompt; `{prompt}` is replaced. "chat" applies the tokenizer's chat template."""

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("jsonl", "reasoning_gym"))
        need = {"jsonl": "path", "reasoning_gym": "task"}[self.source]
        if getattr(self, need) is None:
            value = {"path": 'FILE, with one {"prompt": ..., "answer": ...} object a line', "task": "NAME"}[need]
            raise ConfigError(f"data.source={self.source} needs data.{need}. Set data.{need}={value}.")
        _at_least("data.held_out", self.held_out, 0)
        _at_least("data.size", self.size, 1)
        if self.template != "chat" and "{prompt}" not in self.template:
            raise ConfigError(
                f"data.template={self.template!r} has no {{prompt}}: every prompt would be the same. Add it."
            )


@dataclass
class RewardConfig:
    """How an answer is judged."""

    name: str = ""
    """A row of `rewards.REWARDS`: exact, math, verifier. Needed where samples are judged: mode=train, rollout_only."""
    threshold: float | None = None
    """When set, a score counts as 1.0 if it reaches this and as 0.0 otherwise."""


@dataclass
class SamplingConfig:
    """How the engine samples."""

    max_tokens: int = 0
    """Generated tokens per sample, prompt excluded; needed but with mode=sft, which samples nothing."""
    samples_per_prompt: int = 8
    """Samples of one group."""
    temperature: float = 1.0
    """Divides logits before softmax; 1.0 keeps log-probabilities comparable with the trainer's."""

    def __post_init__(self) -> None:
        _at_least("sampling.max_tokens", self.max_tokens, 0)
        _at_least("sampling.samples_per_prompt", self.samples_per_prompt, 1)
        if self.temperature <= 0:
            raise ConfigError(
                f"sampling.temperature={self.temperature} must be > 0: greedy samples have no group spread. Use 1.0."
            )


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule, for one phase."""

    lr: float
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay: str = "constant"
    """`constant`, "linear" or "cosine", over the phase's steps."""
    weight_decay: float = 0.0
    """AdamW's, apart from the gradient."""
    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.95
    """Decay of the running mean of their squares."""
    eps: float = 1e-8
    """Added to the root of the latter."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def check(self, section: str) -> None:
        """Raises: ConfigError, naming the key by its section."""
        one_of(f"{section}.decay", self.decay, ("constant", "linear", "cosine"))
        for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad"):
            _at_least(f"{section}.{name}", getattr(self, name), 0)
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ConfigError(
                    f"{section}.{name}={value} must be at least 0 and below 1: it weighs a running mean's past."
                )
        if self.eps <= 0:
            raise ConfigError(
                f"{section}.eps={self.eps} must be above 0: Adam would divide by 0 where there never was a gradient."
            )
        if self.min_lr > self.lr:
            raise ConfigError(
                f"{section}.min_lr={self.min_lr} is above {section}.lr={self.lr}: the schedule only goes down. "
                f"Lower {section}.min_lr."
            )


@dataclass
class AlgorithmConfig(OptimizerConfig):
    """The policy update: a recipe, its numbers, and its optimizer."""

    recipe: str = "grpo"
    """A row of `algorithms.recipes.RECIPES`."""
    clip_low: float = 0.2
    """Ratio clipped below 1 - clip_low. With mini_batches=1 the ratio is 1 and this does nothing."""
    clip_high: float = 0.2
    """Ratio clipped above 1 + clip_high. With mini_batches=1 the ratio is 1 and this does nothing."""
    kl_coef: float = 0.0
    """Weight of the k3 KL to the frozen reference; 0 keeps no reference at all."""
    mini_batches: int = 1
    """Optimizer steps per batch of samples."""
    importance_cap: float | None = None
    """Weigh each token by its probability in the trainer over that in the engine, at most this (2 is usual): for
    engines whose kernels or precision, as FP8, are not the trainer's. null weighs all alike."""

    def __post_init__(self) -> None:
        self.check("algorithm")
        for name in ("clip_low", "clip_high", "kl_coef"):
            _at_least(f"algorithm.{name}", getattr(self, name), 0)
        if self.clip_low > 1:
            raise ConfigError(f"algorithm.clip_low={self.clip_low} is above 1, and no ratio is below 0. Set 1 or less.")
        _at_least("algorithm.mini_batches", self.mini_batches, 1)
        _at_least("algorithm.importance_cap", 1 if self.importance_cap is None else self.importance_cap, 1)


@dataclass
class ParallelConfig:
    """How the model is cut over the trainer's ranks. Data parallel size is what remains of trainer.world_size."""

    tp: int = 1
    """Tensor parallel size."""
    sp: bool = False
    """Sequence parallelism over the tensor-parallel group."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int | None = None
    """Virtual pipeline chunks per rank (interleaved schedule)."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, when the split is uneven."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, when the split is uneven."""
    account_for_embedding: bool = False
    """The embedding counts as a layer of the first pipeline stage, which gets one decoder layer less."""
    account_for_loss: bool = False
    """The output layer counts as a layer of the last pipeline stage, which gets one decoder layer less."""
    pipeline_layout: str | None = None
    """Every part of the pipeline letter by letter, such as "Ett|(tt|)*2tmL": megatron-core's
    pipeline_model_parallel_layout. Part c * pp + p is virtual chunk c of stage p."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size."""
    etp: int = 1
    """Tensor parallel size inside each expert."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "etp"):
            _at_least(f"parallel.{name}", getattr(self, name), 1)
        if self.vpp is not None:
            _at_least("parallel.vpp", self.vpp, 2)


@dataclass
class TrainerConfig:
    """The training side: ranks, precision, micro-batches."""

    world_size: int = 1
    """Megatron ranks, one process each."""
    ranks_per_node: int | None = None
    """Consecutive ranks that share a node, which has no others. null: as many as nodes have GPUs; without GPUs, as Ray
    likes."""
    dtype: str = "bfloat16"
    """`bfloat16` or `float32`: parameters and activations."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data parallel ranks."""
    tokens_per_micro_batch: int = 16_384
    """Token budget of one packed micro-batch on one rank."""
    start_timeout_s: float = 300.0
    """Until every rank has built its model."""
    step_timeout_s: float = 3600.0
    """Until every rank has finished one call."""
    threads_per_rank: int = 1
    """CPU threads of each rank's torch."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed to megatron-core's TransformerConfig as they are; unknown names and names set elsewhere are refused."""

    def __post_init__(self) -> None:
        one_of("trainer.dtype", self.dtype, ("bfloat16", "float32"))
        _at_least("trainer.ranks_per_node", 1 if self.ranks_per_node is None else self.ranks_per_node, 1)
        for name in ("world_size", "tokens_per_micro_batch", "threads_per_rank"):
            _at_least(f"trainer.{name}", getattr(self, name), 1)


@dataclass
class RolloutConfig:
    """The rollout side: SGLang servers."""

    engines: int = 1
    """Servers; requests go to the least loaded."""
    tp: int = 1
    """Tensor parallel size of each server."""
    ranks_per_node: int | None = None
    """Engine ranks that share a node, which has no others; with fewer than `tp`, each server lies on several nodes.
    null: each server on one node, or on as few as its GPUs need."""
    ep: int = 1
    """Expert parallel size of each server."""
    dp_attention: int = 1
    """Groups of each server's ranks that attend to requests of their own (SGLang's attn-dp-size)."""
    dp_lm_head: bool = False
    """Cut the output layer within each of those groups (SGLang's enable-dp-lm-head)."""
    moe_dense_tp: int | None = None
    """1 keeps the dense layers of a model with experts whole on every rank (SGLang's moe-dense-tp-size)."""
    dtype: str = "bfloat16"
    """`bfloat16` or `float32`."""
    fp8: bool = False
    """Serve the linears of attention, MLPs and experts in FP8: e4m3 in blocks of 128 x 128 with float32 scales, as
    DeepSeek-V3 is published and `tools/convert export --fp8` writes. The trainer keeps its own dtype."""
    max_total_tokens: int = 16_384
    """KV cache of one server, or of each of its dp_attention groups."""
    max_running_requests: int = 256
    """Samples that one server generates at the same time."""
    start_timeout_s: float = 240.0
    """Until a server answers its health check."""
    request_timeout_s: float = 1800.0
    """Until one generation request is answered."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Passed to sglang.launch_server as --name value; unknown names and names set elsewhere are refused."""

    def __post_init__(self) -> None:
        one_of("rollout.dtype", self.dtype, ("bfloat16", "float32"))
        _at_least("rollout.ranks_per_node", 1 if self.ranks_per_node is None else self.ranks_per_node, 1)
        if self.fp8 and self.dtype != "bfloat16":
            raise ConfigError(
                f"rollout.fp8=true with rollout.dtype={self.dtype}: SGLang's FP8 layers compute in bfloat16. Set "
                "rollout.dtype=bfloat16."
            )
        for name in ("engines", "tp", "ep", "dp_attention", "max_total_tokens", "max_running_requests"):
            _at_least(f"rollout.{name}", getattr(self, name), 1)

    def longest_prompt(self, context: int, max_tokens: int) -> int:
        """Tokens of a prompt to which an engine gives an answer of `max_tokens` whole.

        SGLang 0.5.23 refuses a prompt up to 6 tokens below context and cache, and of the answer to a shorter one keeps
        2 back, without a word (TpModelWorker.get_worker_info, Scheduler.init_req_max_new_tokens).
        """
        return min(context, self.max_total_tokens) - max(max_tokens + 2, 7)


@dataclass
class WeightsConfig:
    """How weights travel from the trainer to the engines. Buckets are always checked on arrival."""

    verify: bool = False
    """Also compare every element of the engines' parameters, after the load, with what the trainer sent."""
    verify_every: int = 1
    """With verify: weight versions (steps) that this divides."""
    delta: bool = False
    """Send only the elements that changed since the last version, which pays between nodes and not inside one. The
    first push, one after a failure and a verified one go whole, as does a message whose changes would be longer. The
    trainer keeps a copy of what it sent: once more its share of the weights in the engines' dtype."""

    def __post_init__(self) -> None:
        _at_least("weights.verify_every", self.verify_every, 1)
        if self.verify_every > 1 and not self.verify:
            raise ConfigError(
                f"weights.verify_every={self.verify_every} with weights.verify=false compares nothing. "
                "Set weights.verify=true, or leave verify_every out."
            )


@dataclass
class SftConfig(OptimizerConfig):
    """Supervised training on the data's own answers: a warm start before RL, or the whole run with mode=sft."""

    lr: float = 0.0
    """Peak learning rate; needed where there are supervised updates."""
    steps: int = 0
    """Optimizer steps; 0 skips the warm start."""
    prompts_per_step: int = 64
    """Prompts, each with its answer, of one optimizer step."""

    def __post_init__(self) -> None:
        self.check("sft")
        _at_least("sft.steps", self.steps, 0)
        _at_least("sft.prompts_per_step", self.prompts_per_step, 1)


@dataclass
class EvaluationConfig:
    """Sampled reward on the held-out prompts, before the first step and after the last."""

    every: int = 0
    """Also evaluate every this many steps; 0 only before and after."""
    samples_per_prompt: int = 1
    """Samples of each held-out prompt, whose rewards are averaged."""

    def __post_init__(self) -> None:
        _at_least("evaluation.every", self.every, 0)
        _at_least("evaluation.samples_per_prompt", self.samples_per_prompt, 1)


@dataclass
class CheckpointConfig:
    """Resumable checkpoints below runs/<name>/checkpoints."""

    every: int = 50
    """Steps between checkpoints; the last step is always saved. 0 saves only when SIGUSR1 asks for it."""
    keep: int = 2
    """Complete checkpoints kept; older ones are removed."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 0)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclass
class ClusterConfig:
    """Where the processes run."""

    address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine."""
    cpus: int | None = None
    """CPUs Ray may count on when it is started here; null counts what the processes need."""
    nodes: int | None = None
    """Nodes that the run is meant for: a layout that wants more is refused before it queues. null asks nobody."""
    gpus_per_node: int = 8
    """GPUs of each of them."""
    gpu_gb: float | None = None
    """Memory of a GPU in GB of 10^9 bytes: a layout that cannot fit is refused. null asks nobody."""
    trainer_nodes: str | None = None
    """Trainer ranks run only on nodes that offer this Ray resource, such as `trainer` of
    ray start --resources='{"trainer": 1000}'; null takes any."""
    rollout_nodes: str | None = None
    """The same for engines."""

    def __post_init__(self) -> None:
        _at_least("cluster.nodes", 1 if self.nodes is None else self.nodes, 1)
        _at_least("cluster.gpus_per_node", self.gpus_per_node, 1)
        _at_least("cluster.gpu_gb", 1 if self.gpu_gb is None else self.gpu_gb, 1)
        host = r"(ray://)?([^\s:/\[\]]+|\[[0-9a-fA-F:]+\])"
        match = re.fullmatch(rf"auto|{host}:(?P<port>\d{{1,5}})", "auto" if self.address is None else self.address)
        if match is None or int(match["port"] or 0) > 65535:
            raise ConfigError(
                f"cluster.address={self.address!r} is no address of a Ray cluster. Write HOST:PORT, as `ray start "
                '--head` prints it, "auto" for the one that runs here, or null to start one.'
            )


MODES = ("train", "sft", "rollout_only", "train_only")


@dataclass
class Config:
    """One run."""

    name: str
    """Run directory below runs_dir."""
    steps: int
    """Policy updates (supervised updates with mode=sft)."""
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig
    prompts_per_step: int = 0
    """Prompts of one policy update; needed but with mode=sft. Supervised updates have sft.prompts_per_step."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mode: str = "train"
    """`train`; "sft"; "rollout_only" (generate and judge, no trainer); "train_only" (replay `samples`, no engine)."""
    samples: str | None = None
    """samples.jsonl of an earlier run, for mode=train_only."""
    resume: str = "auto"
    """`auto`: continue from the newest complete checkpoint if there is one; "never": refuse to touch an earlier run."""
    seed: int = 0
    """Seeds initial weights and sampling."""
    runs_dir: str = "runs"
    """Where run directories are made."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.name) or self.name.startswith("."):
            raise ConfigError(f"name={self.name!r} names a directory: use letters, digits, '_', '-', '+' and '.' only.")
        _check_numbers(self)
        one_of("mode", self.mode, MODES)
        one_of("resume", self.resume, ("auto", "never"))
        _at_least("steps", self.steps, 0)
        _at_least("prompts_per_step", self.prompts_per_step, 0)
        if (self.mode == "train_only") != (self.samples is not None):
            raise ConfigError(
                f"mode={self.mode} with samples={self.samples}: mode=train_only replays a file named by samples=PATH, "
                "and no other mode reads one. Set both or neither."
            )
