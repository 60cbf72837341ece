"""DeepSeek-V3 and what shares its architecture (R1, Kimi-K2, Moonlight): latent attention."""

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.table import Row, Table
from megatron_rl.layouts.terms import Concat, HfTensor, Rep, Rows
from megatron_rl.models import noaux
from megatron_rl.models.family import Architecture, Family, HfConfig, number, only_keys, read, rename, rotary
from megatron_rl.models.rows import attention_output, same

SUPPORTED: dict[str, Any] = {**noaux.SUPPORTED, "attention_bias": False, "rope_interleave": True}
NAMES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
YARN = ("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    return noaux.table(hf, attention(hf))


def attention(hf: HfConfig) -> tuple[Row, ...]:
    """Latent attention. Every rank of both sides holds the way down whole."""
    hidden, heads, kv_rank = read(hf, "hidden_size"), read(hf, "num_attention_heads"), read(hf, "kv_lora_rank")
    nope, rope, value = read(hf, "qk_nope_head_dim"), read(hf, "qk_rope_head_dim"), read(hf, "v_head_dim")
    kv_a = HfTensor("self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden))
    kv_b = HfTensor("self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank))
    way_down, norms, query = _query(hf, kv_a)
    return (
        same("input_layernorm.weight", "input_layernorm.weight", (hidden,)),
        way_down,
        *norms,
        same("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", (kv_rank,)),
        query,
        _by_heads("self_attention.linear_kv_up_proj.weight", kv_b, nope + value),
        attention_output(hidden, heads, value),
    )


def _query(hf: HfConfig, kv_a: HfTensor) -> tuple[Row, tuple[Row, ...], Row]:
    """(way down, norm between, way up) of queries; SGLang stacks their way down on that of keys and values.

    With a `q_lora_rank` of null queries have one projection.
    """
    hidden, rank = read(hf, "hidden_size"), _query_rank(hf)
    dim = read(hf, "qk_nope_head_dim") + read(hf, "qk_rope_head_dim")
    size = read(hf, "num_attention_heads") * dim
    megatron = {"self_attention.linear_kv_down_proj.weight": Rep(kv_a)}
    if rank is None:
        q = HfTensor("self_attn.q_proj.weight", (size, hidden))
        query = _by_heads("self_attention.linear_q_proj.weight", q, dim)
        return Row(megatron, sglang={kv_a.name: Rep(kv_a)}), (), query
    q_a = HfTensor("self_attn.q_a_proj.weight", (rank, hidden))
    norm = same("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", (rank,))
    stacked = {"self_attn.fused_qkv_a_proj_with_mqa.weight": Concat((Rep(q_a), Rep(kv_a)))}
    q_b = HfTensor("self_attn.q_b_proj.weight", (size, rank))
    way_up = _by_heads("self_attention.linear_q_up_proj.weight", q_b, dim)
    return Row({"self_attention.linear_q_down_proj.weight": Rep(q_a), **megatron}, stacked), (norm,), way_up


def _by_heads(megatron: str, tensor: HfTensor, dim: int) -> Row:
    """Heads of `dim` rows each, shared out over the ranks."""
    return Row(
        megatron={megatron: Rows(tensor, "tp", unit=dim)}, sglang={tensor.name: Rows(tensor, "attn_tp", unit=dim)}
    )


def _query_rank(hf: HfConfig) -> int | None:
    return None if hf.get("q_lora_rank", 0) is None else read(hf, "q_lora_rank")


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    base, scaling = rotary(hf)
    config = {
        **noaux.megatron(hf),
        **rename(hf, NAMES),
        "qk_layernorm": True,
        "q_lora_rank": _query_rank(hf),
        **_yarn(base, scaling),
    }
    return Architecture(
        mla=True,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=base,
        max_position_embeddings=read(hf, "max_position_embeddings"),
    )


def _yarn(base: float, scaling: dict[str, Any] | None) -> dict[str, float | str]:
    if scaling is None:
        return {"rope_type": "rope", "rotary_base": base}
    only_keys(scaling, YARN)
    if scaling["rope_type"] != "yarn":
        raise ConfigError(
            f"rope_type={scaling['rope_type']!r} is not supported with latent attention. Use 'yarn' or none."
        )
    for key in YARN[1:]:
        number(f"{key} of rope_scaling", scaling[key])  # transformers takes an mscale of 0 for none given
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": scaling["factor"],
        **{key: scaling[key] for key in YARN[2:]},
    }


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
