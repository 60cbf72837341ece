"""Qwen3-MoE: grouped-query attention with normed queries and keys, routed experts in every layer."""

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.table import Row, Table
from megatron_rl.layouts.terms import Cols, Concat, HfTensor, PerGroup, Rows
from megatron_rl.models.family import COMMON, FIXED, Architecture, Family, HfConfig, read, rename, rotary
from megatron_rl.models.rows import decoder, embedding, head, routed_experts, same

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
NAMES = {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
EXPERTS = ("num_experts", "num_local_experts")  # transformers 5 writes the second


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    hidden, layers = read(hf, "hidden_size"), read(hf, "num_hidden_layers")
    vocab = read(hf, "vocab_size")
    rows = [attention(hf) + moe(hf)] * layers
    return Table(vocab, layers, (embedding(vocab, hidden), *decoder(rows), head(vocab, hidden)))


def attention(hf: HfConfig) -> tuple[Row, ...]:
    """Megatron interleaves q, k and v by key-value head and fuses the norm before them; SGLang stacks them."""
    hidden, dim = read(hf, "hidden_size"), read(hf, "head_dim")
    heads, groups = read(hf, "num_attention_heads"), read(hf, "num_key_value_heads")
    q = HfTensor("self_attn.q_proj.weight", (heads * dim, hidden))
    k = HfTensor("self_attn.k_proj.weight", (groups * dim, hidden))
    v = HfTensor("self_attn.v_proj.weight", (groups * dim, hidden))
    out = Cols(HfTensor("self_attn.o_proj.weight", (hidden, heads * dim)), "tp", unit=dim)
    kv = (Rows(k, "tp", unit=dim, repeat=True), Rows(v, "tp", unit=dim, repeat=True))
    return (
        same("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (hidden,)),
        Row(
            megatron={"self_attention.linear_qkv.weight": PerGroup((q, k, v), groups, "tp")},
            sglang={"self_attn.qkv_proj.weight": Concat((Rows(q, "tp", unit=dim), *kv))},
        ),
        same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", (dim,)),
        same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", (dim,)),
        Row(megatron={"self_attention.linear_proj.weight": out}, sglang={out.tensor.name: out}),
    )


def moe(hf: HfConfig) -> tuple[Row, ...]:
    """Router and experts."""
    hidden, experts = read(hf, "hidden_size"), read(hf, *EXPERTS)
    return (
        same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (hidden,)),
        same("mlp.router.weight", "mlp.gate.weight", (experts, hidden)),
        *routed_experts(experts, hidden, read(hf, "moe_intermediate_size")),
    )


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    base, scaling = rotary(hf)
    if scaling is not None:
        raise ConfigError(
            f"config.json scales positions ({scaling}), which is not supported here. Remove rope_scaling."
        )
    config = {
        **FIXED,
        **rename(hf, COMMON | NAMES),
        "num_moe_experts": read(hf, *EXPERTS),
        "moe_router_score_function": "softmax",
        # Softmax after the choice is softmax before it, divided by the sum over the chosen.
        "moe_router_pre_softmax": not read(hf, "norm_topk_prob"),
    }
    return Architecture(
        mla=False,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=base,
        max_position_embeddings=read(hf, "max_position_embeddings"),
    )


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
