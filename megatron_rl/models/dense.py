"""What families without experts share: grouped-query attention and a gated MLP in every layer."""

from megatron_rl.layouts.table import Table
from megatron_rl.models.family import COMMON, FIXED, Architecture, HfConfig, read, rename, scaled_rotary
from megatron_rl.models.rows import decoder, dense_mlp, embedding, grouped_attention, head


def table(
    hf: HfConfig,
    *,
    head_dim: int,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    dp_attention: bool = False,
    head_on_every_stage: bool = False,
) -> Table:
    """Every tensor. The last two say what SGLang's class can do, and where it builds the output layer."""
    attention_axis, head_axis = ("attn_tp", "head_tp") if dp_attention else ("tp", "tp")
    hidden, layers, vocab = read(hf, "hidden_size"), read(hf, "num_hidden_layers"), read(hf, "vocab_size")
    layer = grouped_attention(
        hidden,
        heads=read(hf, "num_attention_heads"),
        groups=read(hf, "num_key_value_heads"),
        dim=head_dim,
        bias=qkv_bias,
        qk_norm=qk_norm,
        axis=attention_axis,
    ) + dense_mlp(hidden, read(hf, "intermediate_size"))
    tied = is_tied(hf)
    first = embedding(vocab, hidden, axis=attention_axis)
    last = head(vocab, hidden, tied=tied, axis=head_axis, on_every_stage=head_on_every_stage)
    # Published checkpoints of tied models may hold the output layer all the same.
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    return Table(vocab, layers, (first, *decoder([layer] * layers), *last), tied=tied, aliases=aliases)


def architecture(hf: HfConfig, *, head_dim: int, qkv_bias: bool = False, qk_norm: bool = False) -> Architecture:
    """The model in megatron-core's words."""
    base, scaling = scaled_rotary(hf)
    config = {
        **FIXED,
        **rename(hf, COMMON),
        "num_query_groups": read(hf, "num_key_value_heads"),
        "kv_channels": head_dim,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
    }
    return Architecture(
        mla=False,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=base,
        max_position_embeddings=read(hf, "max_position_embeddings"),
        rope_scaling=scaling,
        tied=is_tied(hf),
    )


def is_tied(hf: HfConfig) -> bool:
    """Whether the output layer is the embedding; every family here says so, or has a head of its own."""
    return bool(hf.get("tie_word_embeddings", False))
