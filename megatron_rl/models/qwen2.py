"""Qwen2 and Qwen2.5: queries, keys and values have biases; the small ones are tied."""

from typing import Any

from megatron_rl.layouts.table import Table
from megatron_rl.models import dense
from megatron_rl.models.family import Architecture, Family, HfConfig, head_dim

SUPPORTED: dict[str, Any] = {
    "dual_chunk_attention_config": None,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    return dense.table(hf, head_dim=head_dim(hf), qkv_bias=True)


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    return dense.architecture(hf, head_dim=head_dim(hf), qkv_bias=True)


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
