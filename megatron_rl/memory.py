"""Bytes on each GPU, before there is one: what a layout table says exactly, and estimates of what comes and goes.

Weights, gradients, optimizer states and KV cache are exact. Activations are counted from the shapes of one layer, and
what libraries take for themselves is a guess (`RUNTIME_BYTES`) or SGLang's own rule; no GPU has confirmed either.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from megatron_rl.config import Config
from megatron_rl.layouts.boxes import DTYPE_BYTES, TensorLayout
from megatron_rl.layouts.compile import megatron_layouts, sglang_layouts
from megatron_rl.layouts.fp8 import with_scales
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.pipeline import Chunk
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.layouts.table import Table

Use = dict[str, int]
"""What it is for -> bytes on one GPU."""
Megatron = Mapping[str, Any]
"""`Architecture.megatron`: the model's sizes."""

EXACT = ("weights", "gradients", "optimizer", "KV cache")
RUNTIME_BYTES = {"trainer": 6_000_000_000, "engine": 3_000_000_000}
"""CUDA's context and NCCL's channels; in the trainer also workspaces of cuBLAS and Transformer Engine and fragments of
the allocator. A guess."""
IMBALANCE = 2
"""Tokens of the busiest rank's experts over the mean: nothing balances them while a policy is trained."""
LOGITS_CHUNK = 1 << 26
"""Elements of logits whose log-probabilities are computed together; 256 MB in float32, and work enough for a GPU."""
MIB = 1 << 20


def uses(
    config: Config,
    table: Table,
    megatron: Megatron,
    *,
    trainer: MegatronTopology | None,
    engine: SglangTopology | None,
) -> dict[str, Use]:
    """Of every kind of rank that has a topology."""
    stages = range(0 if trainer is None else trainer.pp)
    found = {f"trainer, stage {i}": trainer_use(config, table, megatron, trainer, i) for i in stages if trainer}
    return found if engine is None else {**found, "engine": engine_use(config, table, megatron, engine)}


def too_large(found: Mapping[str, Use], gpu_gb: float) -> Iterator[str]:
    """Whether what is exact about the ranks fits a GPU. Estimates are for people: see tools/plan.py."""
    who, use = max(found.items(), key=lambda pair: states(pair[1]))
    if states(use) > gpu_gb * 1e9:
        exact = ", ".join(f"{name} {use[name] / 1e9:.1f}" for name in EXACT if name in use)
        yield (
            f"{who}: {exact} are {states(use) / 1e9:.1f} GB on each GPU, which has cluster.gpu_gb={gpu_gb:g}: memory "
            "would run out before the first token. Cut the model further (parallel.pp, parallel.ep, rollout.tp, "
            "rollout.ep), lower rollout.max_total_tokens, or take larger GPUs."
        )


def states(use: Mapping[str, int]) -> int:
    """Bytes that are there whatever the batch is: without them no step can begin."""
    return sum(use.get(name, 0) for name in EXACT)


def trainer_use(config: Config, table: Table, megatron: Megatron, topology: MegatronTopology, stage: int) -> Use:
    """Of each rank of a pipeline stage: they hold other rectangles of the same shapes.

    Megatron keeps a float32 gradient of every weight (grad_reduce_in_fp32); Adam's two moments, and with bfloat16 the
    weights, are float32 too, and the distributed optimizer shares these out over the ranks that hold equal weights.
    Source: megatron-core 0.19.2, distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py.
    """
    rank = stage * topology.world_size // topology.pp
    layouts = megatron_layouts(table, topology, rank, dtype=config.trainer.dtype)
    trained = [t for t in layouts if ":mtp." not in t.name and not t.name.endswith("expert_bias")]
    of_experts = _elements(t for t in trained if ".mlp.experts." in t.name)
    elements = _elements(trained)
    each = 12 if config.trainer.dtype == "bfloat16" else 8
    shards = (topology.dp * topology.cp, topology.edp) if config.trainer.distributed_optimizer else (1, 1)
    weights = sum(t.nbytes for t in layouts)
    chunks = topology.chunks(rank)
    sizes = {"T": config.trainer.tokens_per_micro_batch, "tp": topology.tp, "etp": topology.etp}
    item = DTYPE_BYTES[config.trainer.dtype]
    has_head = any(chunk.has_head for chunk in chunks)
    logits = sizes["T"] * topology.padded_vocab(table.vocab_size) // topology.tp
    return {
        "weights": weights,
        "gradients": 4 * elements,
        "optimizer": each * -(-(elements - of_experts) // shards[0]) + each * -(-of_experts // shards[1]),
        "activations": item * _activations(config, megatron, topology, chunks, stage, **sizes),
        # And their gradient; of a part of them three float32 of its size (trainer/logprobs.py).
        "logits": (2 * item * logits + 12 * min(logits, LOGITS_CHUNK)) * has_head,
        "kept for weights.delta": weights * config.weights.delta,
        "runtime": RUNTIME_BYTES["trainer"],
    }


def _elements(layouts: Iterable[TensorLayout]) -> int:
    return sum(prod(t.shape) for t in layouts)


def _activations(
    config: Config,
    megatron: Megatron,
    topology: MegatronTopology,
    chunks: tuple[Chunk, ...],
    stage: int,
    **sizes: int,
) -> int:
    """Elements kept between forward and backward passes, and those of the layer in work.

    Source of what is in flight: megatron-core 0.19.2, pipeline_parallel/schedules.py, `num_warmup_microbatches`.
    """
    layers = [layer for chunk in chunks for layer in chunk.layers]
    most = max((_layer(megatron, layer, **sizes) for layer in layers), default=0)
    ahead, chunks_each = topology.pp - stage - 1, topology.vpp or 1
    passes = (ahead if chunks_each == 1 else 2 * ahead + (chunks_each - 1) * topology.pp) + 1
    options = config.trainer.megatron
    layer_input = sizes["T"] // sizes["tp"] * int(megatron["hidden_size"])
    if options.get("recompute_granularity") == "full" and options.get("recompute_method") == "uniform":
        at_once = int(options["recompute_num_layers"])
        return passes * -(-len(layers) // at_once) * layer_input // chunks_each + 2 * at_once * most
    kept = sum(_layer(megatron, layer, **sizes) for layer in layers)
    return passes * kept // chunks_each + most


def _layer(m: Megatron, layer: int, *, T: int, tp: int, etp: int) -> int:
    """Elements that one layer keeps for its backward pass, of T tokens; sequence parallel outside of attention and MLP.

    Counted from what megatron's layers compute: each input of a norm, a product or an activation function once.
    """
    hidden, heads = int(m["hidden_size"]), int(m["num_attention_heads"])
    if m.get("kv_lora_rank"):
        down = (m.get("q_lora_rank") or 0) + m["kv_lora_rank"] + m["qk_pos_emb_head_dim"]
        query = m["qk_head_dim"] + m["qk_pos_emb_head_dim"]
        # Before and after their norms; queries and keys before and after they are rotated.
        attention = 2 * T * down + T * heads // tp * (4 * query + 2 * m["v_head_dim"])
    else:
        dim, groups = m["kv_channels"], max(m["num_query_groups"], tp)
        attention = T * dim // tp * (4 * heads + 4 * groups)
    attention += 4 * T // tp * hidden + 2 * T * hidden  # residuals and norms; gathered inputs of attention and MLP
    every = m.get("moe_layer_freq", 1)
    has_experts = m.get("num_moe_experts") and (every[layer] if isinstance(every, list) else True)
    if not has_experts:
        return int(attention + 3 * T * m["ffn_hidden_size"] // tp)
    rows = IMBALANCE * T // tp * m["moe_router_topk"] * etp
    routed = rows * (4 * hidden + 3 * m["moe_ffn_hidden_size"] // etp)  # permuted, received, returned, sorted back
    shared = 3 * T * (m.get("moe_shared_expert_intermediate_size") or 0) // tp
    scores = 6 * T // tp * m["num_moe_experts"]  # three of them in float32
    return int(attention + routed + shared + scores)


def engine_use(config: Config, table: Table, megatron: Megatron, topology: SglangTopology) -> Use:
    """Of each rank of an engine.

    "working" is what SGLang itself leaves free for activations and CUDA graphs, from the size of the chunks it reads
    prompts in and of its largest batch. Source: sglang 0.5.23, srt/arg_groups/memory_hook.py.
    """
    rollout = config.rollout
    layouts = sglang_layouts(table, topology, 0, dtype=rollout.dtype, quantized=rollout.fp8)
    weights = sum(t.nbytes for t in with_scales(layouts))
    item = 1 if str(rollout.sglang.get("kv_cache_dtype", "auto")).startswith("fp8") else DTYPE_BYTES[rollout.dtype]
    attention_ranks = topology.tp // topology.dp_attention
    heads, latent = megatron["num_attention_heads"], megatron.get("kv_lora_rank")
    if latent:
        per_token = latent + megatron["qk_pos_emb_head_dim"]
        # w_kc and w_vc: the way up once more, as decoding multiplies with it.
        up = heads // attention_ranks * (megatron["qk_head_dim"] + megatron["v_head_dim"]) * latent
        weights += table.num_layers * up * DTYPE_BYTES[rollout.dtype]
    else:
        per_token = 2 * max(megatron["num_query_groups"] // attention_ranks, 1) * megatron["kv_channels"]
    chunk = int(rollout.sglang.get("chunked_prefill_size", 8192))
    batch = min(rollout.max_running_requests, 512 if topology.tp >= 4 else 256)
    working = 512 + 1.5 * chunk + topology.tp * 128 + 2 * batch + (1536 if latent else 0)
    if topology.dp_attention > 1:
        working += batch * topology.dp_attention * (4.5 if batch > 300 else 3)
    return {
        "weights": weights,
        "KV cache": table.num_layers * per_token * item * rollout.max_total_tokens,
        "working": round(max(working, 10 * 1024)) * MIB,
        "runtime": RUNTIME_BYTES["engine"],
    }
