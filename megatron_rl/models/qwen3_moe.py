"""Qwen3-MoE: grouped-query attention with normed queries and keys, routed experts in every layer."""

from typing import Any

from megatron_rl.layouts.table import Table
from megatron_rl.models.family import (
    COMMON,
    EXPERTS,
    FIXED,
    Architecture,
    Family,
    HfConfig,
    read,
    rename,
    scaled_rotary,
    softmax_router,
)
from megatron_rl.models.rows import decoder, embedding, grouped_attention, head, routed_experts, router

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dual_chunk_attention_config": None,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
NAMES = {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
COUNT = ("num_experts", "num_local_experts")  # transformers 5 writes the second


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    hidden, layers, vocab = read(hf, "hidden_size"), read(hf, "num_hidden_layers"), read(hf, "vocab_size")
    attention = grouped_attention(
        hidden,
        heads=read(hf, "num_attention_heads"),
        groups=read(hf, "num_key_value_heads"),
        dim=read(hf, "head_dim"),
        qk_norm=True,
    )
    experts, size = read(hf, *COUNT), read(hf, "moe_intermediate_size")
    rows = [attention + router(experts, hidden) + routed_experts(experts, hidden, size)] * layers
    last = head(vocab, hidden, on_every_stage=True)
    return Table(vocab, layers, (embedding(vocab, hidden), *decoder(rows), *last))


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    base, scaling = scaled_rotary(hf)
    config = {
        **FIXED,
        **rename(hf, COMMON | EXPERTS | NAMES),
        "qk_layernorm": True,
        "num_moe_experts": read(hf, *COUNT),
        **softmax_router(renormalized=bool(read(hf, "norm_topk_prob"))),
    }
    return Architecture(
        mla=False,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=base,
        max_position_embeddings=read(hf, "max_position_embeddings"),
        rope_scaling=scaling,
    )


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
