"""Qwen3 without experts: queries and keys are normed head by head; the small ones are tied."""

from typing import Any

from megatron_rl.layouts.table import Table
from megatron_rl.models import dense
from megatron_rl.models.family import Architecture, Family, HfConfig, read

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    return dense.table(hf, head_dim=read(hf, "head_dim"), qk_norm=True, dp_attention=True)


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    return dense.architecture(hf, head_dim=read(hf, "head_dim"), qk_norm=True)


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
