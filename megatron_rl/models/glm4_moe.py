"""GLM-4.5: grouped-query attention that rotates a part of each head, and experts as DeepSeek-V3 chooses them."""

from typing import Any

from megatron_rl.layouts.table import Table
from megatron_rl.models import noaux
from megatron_rl.models.family import Architecture, Family, HfConfig, head_dim, number, read, unscaled_rotary
from megatron_rl.models.rows import grouped_attention

SUPPORTED: dict[str, Any] = noaux.SUPPORTED


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    attention = grouped_attention(
        read(hf, "hidden_size"),
        heads=read(hf, "num_attention_heads"),
        groups=read(hf, "num_key_value_heads"),
        dim=head_dim(hf),
        bias=_is_set(hf, "attention_bias"),
        qk_norm=_is_set(hf, "use_qk_norm"),
    )
    return noaux.table(hf, attention, sglang_router_dtype="float32", head_on_every_stage=True)


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    config = {
        **noaux.megatron(hf),
        "num_query_groups": read(hf, "num_key_value_heads"),
        "kv_channels": head_dim(hf),
        "qk_layernorm": _is_set(hf, "use_qk_norm"),
        "add_qkv_bias": _is_set(hf, "attention_bias"),
    }
    return Architecture(
        mla=False,
        megatron=config,
        vocab_size=read(hf, "vocab_size"),
        rotary_base=unscaled_rotary(hf),
        rotary_percent=_rotary_percent(hf),
        max_position_embeddings=read(hf, "max_position_embeddings"),
    )


def _is_set(hf: HfConfig, key: str) -> bool:
    return bool(hf.get(key, False))  # what both libraries take when it is left out


def _rotary_percent(hf: HfConfig) -> float:
    places: tuple[HfConfig, HfConfig] = (hf.get("rope_parameters") or {}, hf)
    share = next((p["partial_rotary_factor"] for p in places if "partial_rotary_factor" in p), 0.5)  # as above
    return number("partial_rotary_factor", share)


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
