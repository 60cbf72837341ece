"""Mixtral: grouped-query attention, and in every layer experts under names of their own."""

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.table import Table
from megatron_rl.models.family import (
    COMMON,
    FIXED,
    Architecture,
    Family,
    HfConfig,
    equal_heads,
    head_dim,
    read,
    rename,
    softmax_router,
    unscaled_rotary,
)
from megatron_rl.models.rows import decoder, embedding, grouped_attention, head, routed_experts, router

SUPPORTED: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False}
NAMES = {
    "num_query_groups": "num_key_value_heads",
    "num_moe_experts": "num_local_experts",
    "moe_ffn_hidden_size": "intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
}
PREFIX = "block_sparse_moe."
W1_W3_W2 = ("w1", "w3", "w2")
"""Gate, up and down."""


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    hidden, layers, vocab = read(hf, "hidden_size"), read(hf, "num_hidden_layers"), read(hf, "vocab_size")
    experts, size = read(hf, "num_local_experts"), read(hf, "intermediate_size")
    heads, groups = read(hf, "num_attention_heads"), read(hf, "num_key_value_heads")
    attention = grouped_attention(hidden, heads=heads, groups=groups, dim=head_dim(hf), axis="tp")
    moe = router(experts, hidden, prefix=PREFIX)
    moe += routed_experts(experts, hidden, size, prefix=PREFIX, names=W1_W3_W2)
    rows = [attention + moe] * layers
    last = head(vocab, hidden, axis="tp", on_every_stage=True)
    return Table(vocab, layers, (embedding(vocab, hidden, axis="tp"), *decoder(rows), *last))


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    window = hf.get("sliding_window")
    if window is not None and window < read(hf, "max_position_embeddings"):
        raise ConfigError(
            f"config.json has sliding_window={window}: neither the trainer nor SGLang's Mixtral limits attention to a "
            "window, so longer sequences would differ. Use a checkpoint whose sliding_window is null."
        )
    config = {
        **FIXED,
        **rename(hf, COMMON | NAMES),
        "kv_channels": equal_heads(hf),
        "qk_layernorm": False,
        **softmax_router(renormalized=True),
    }
    return Architecture(
        mla=False,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=unscaled_rotary(hf),
        max_position_embeddings=read(hf, "max_position_embeddings"),
    )


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
