"""Llama 3, 3.1 and 3.2: no biases, queries and keys as they are; the small ones are tied."""

from typing import Any

from megatron_rl.layouts.table import Table
from megatron_rl.models import dense
from megatron_rl.models.family import Architecture, Family, HfConfig, head_dim

SUPPORTED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}


def table(hf: HfConfig) -> Table:
    """Every tensor."""
    return dense.table(hf, head_dim=head_dim(hf), head_on_every_stage=True)


def architecture(hf: HfConfig) -> Architecture:
    """The model in megatron-core's words."""
    return dense.architecture(hf, head_dim=head_dim(hf))


FAMILY = Family(supported=SUPPORTED, architecture=architecture, table=table)
