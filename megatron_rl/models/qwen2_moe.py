"""Qwen2-MoE: biases on queries, keys and values, and beside the experts of a layer a shared one behind a gate."""

from typing import Any

from megatron_rl.layouts.table import Table
from megatron_rl.models.family import (
    COMMON,
    EXPERTS,
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
from megatron_rl.models.rows import decoder, embedding, gated_mlp, grouped_attention, head, routed_experts, router, same

SUPPORTED: dict[str, Any] = {
    # SGLang has experts in every layer, whatever these say.
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "dual_chunk_attention_config": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
SHARED = "mlp.shared_expert."
NAMES = {
    "num_query_groups": "num_key_value_heads",
    "num_moe_experts": "num_experts",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    hidden, layers, vocab = read(hf, "hidden_size"), read(hf, "num_hidden_layers"), read(hf, "vocab_size")
    experts = read(hf, "num_experts")
    layer = (
        *grouped_attention(
            hidden,
            heads=read(hf, "num_attention_heads"),
            groups=read(hf, "num_key_value_heads"),
            dim=head_dim(hf),
            bias=_has_bias(hf),
        ),
        *router(experts, hidden),
        *routed_experts(experts, hidden, read(hf, "moe_intermediate_size")),
        *gated_mlp("mlp.shared_experts.", hidden, read(hf, NAMES["moe_shared_expert_intermediate_size"]), hf=SHARED),
        same("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", (1, hidden)),
    )
    last = head(vocab, hidden, on_every_stage=True)
    return Table(vocab, layers, (embedding(vocab, hidden), *decoder([layer] * layers), *last))


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    config = {
        **FIXED,
        **rename(hf, COMMON | EXPERTS | NAMES),
        "kv_channels": equal_heads(hf),
        "qk_layernorm": False,
        "add_qkv_bias": _has_bias(hf),
        "moe_shared_expert_gate": True,
        **softmax_router(renormalized=bool(hf.get("norm_topk_prob", False))),
    }
    return Architecture(
        mla=False,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=unscaled_rotary(hf),
        max_position_embeddings=read(hf, "max_position_embeddings"),
    )


def _has_bias(hf: HfConfig) -> bool:
    return bool(hf.get("qkv_bias", True))  # configs older than the key have it


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
