"""DeepSeek-V3 and what shares its architecture (R1, Kimi-K2): latent attention, shared and routed experts."""

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.table import Row, Table
from megatron_rl.layouts.terms import Concat, HfTensor, Rep, Rows
from megatron_rl.models.family import (
    COMMON,
    EXPERTS,
    FIXED,
    Architecture,
    Family,
    HfConfig,
    only_keys,
    read,
    rename,
    rotary,
)
from megatron_rl.models.rows import (
    attention_output,
    decoder,
    dense_mlp,
    embedding,
    gated_mlp,
    head,
    routed_experts,
    router,
    same,
)

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
NAMES = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
YARN = ("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def table(hf: HfConfig) -> Table:
    """Every tensor of the main model; the multi-token prediction layers after it are not carried."""
    hidden, layers = read(hf, "hidden_size"), read(hf, "num_hidden_layers")
    vocab = read(hf, "vocab_size")
    dense = dense_mlp(hidden, read(hf, "intermediate_size"), axis="dense_tp")
    first_moe = read(hf, "first_k_dense_replace")
    rows = [attention(hf) + (moe(hf) if i >= first_moe else dense) for i in range(layers)]
    return Table(vocab, layers, (embedding(vocab, hidden), *decoder(rows), *head(vocab, hidden)))


def attention(hf: HfConfig) -> tuple[Row, ...]:
    """Latent attention. SGLang stacks the two down projections; every rank of both sides holds them whole."""
    hidden, heads = read(hf, "hidden_size"), read(hf, "num_attention_heads")
    q_rank, kv_rank = read(hf, "q_lora_rank"), read(hf, "kv_lora_rank")
    nope, rope, value = read(hf, "qk_nope_head_dim"), read(hf, "qk_rope_head_dim"), read(hf, "v_head_dim")
    q_a = HfTensor("self_attn.q_a_proj.weight", (q_rank, hidden))
    kv_a = HfTensor("self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden))
    q_b = HfTensor("self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank))
    kv_b = HfTensor("self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank))
    return (
        same("input_layernorm.weight", "input_layernorm.weight", (hidden,)),
        Row(
            megatron={
                "self_attention.linear_q_down_proj.weight": Rep(q_a),
                "self_attention.linear_kv_down_proj.weight": Rep(kv_a),
            },
            sglang={"self_attn.fused_qkv_a_proj_with_mqa.weight": Concat((Rep(q_a), Rep(kv_a)))},
        ),
        same("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", (q_rank,)),
        same("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", (kv_rank,)),
        _by_heads("self_attention.linear_q_up_proj.weight", q_b, nope + rope),
        _by_heads("self_attention.linear_kv_up_proj.weight", kv_b, nope + value),
        attention_output(hidden, heads, value),
    )


def _by_heads(megatron: str, tensor: HfTensor, dim: int) -> Row:
    """Heads of `dim` rows each, shared out over the ranks."""
    return Row(
        megatron={megatron: Rows(tensor, "tp", unit=dim)}, sglang={tensor.name: Rows(tensor, "attn_tp", unit=dim)}
    )


def moe(hf: HfConfig) -> tuple[Row, ...]:
    """Router, routed experts and shared experts. The correction bias is float32 on every side."""
    hidden, experts, size = read(hf, "hidden_size"), read(hf, "n_routed_experts"), read(hf, "moe_intermediate_size")
    return (
        *router(experts, hidden),
        same("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", (experts,), dtype="float32"),
        *routed_experts(experts, hidden, size),
        *gated_mlp("mlp.shared_experts.", hidden, size * read(hf, "n_shared_experts")),
    )


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    base, scaling = rotary(hf)
    layers, first = read(hf, "num_hidden_layers"), read(hf, "first_k_dense_replace")
    config = {
        **FIXED,
        **rename(hf, COMMON | EXPERTS | NAMES),
        "qk_layernorm": True,
        "moe_layer_freq": [int(i >= first) for i in range(layers)],
        "moe_shared_expert_intermediate_size": read(hf, "moe_intermediate_size") * read(hf, "n_shared_experts"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **_groups(hf),
        **_yarn(base, scaling),
    }
    return Architecture(
        mla=True,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=base,
        max_position_embeddings=read(hf, "max_position_embeddings"),
    )


def _groups(hf: HfConfig) -> dict[str, int]:
    """Group-limited routing. Megatron scores a group by its best topk/topk_group experts, DeepSeek by its best two."""
    groups, kept, topk = read(hf, "n_group"), read(hf, "topk_group"), read(hf, "num_experts_per_tok")
    if groups == kept:
        return {}
    if topk // kept != 2:
        raise ConfigError(
            f"num_experts_per_tok={topk} with topk_group={kept} of n_group={groups}: Megatron scores a group by its "
            f"best {topk // kept} experts, this architecture by its best 2. Set num_experts_per_tok to {2 * kept}, or "
            "n_group and topk_group to 1."
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


def _yarn(base: float, scaling: dict[str, Any] | None) -> dict[str, float | str]:
    if scaling is None:
        return {"rope_type": "rope", "rotary_base": base}
    only_keys(scaling, YARN)
    if scaling["rope_type"] != "yarn":
        raise ConfigError(
            f"rope_type={scaling['rope_type']!r} is not supported with latent attention. Use 'yarn' or none."
        )
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": scaling["factor"],
        **{key: scaling[key] for key in YARN[2:]},
    }


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
