"""Rope scaling of attention that is not latent, as transformers and SGLang compute it."""

from collections.abc import Mapping
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.models.family import SCALING

Scaling = Mapping[str, Any] | None


def embedding_type(scaling: Scaling) -> str:
    """What megatron-core calls it."""
    return "yarn" if scaling is not None and scaling["rope_type"] == "yarn" else "rope"


def configure(config: TransformerConfig, scaling: Scaling) -> None:
    """Prepare `config` for layers and model; megatron-core looks for yarn in attributes that are no fields of it."""
    if embedding_type(scaling) != "yarn":
        return
    assert scaling is not None
    for key in SCALING["yarn"]:
        name = "rotary_scaling_factor" if key == "factor" else key
        setattr(config, f"yarn_{name}", scaling[key])
    config.yarn_correction_range_round_to_int = True
    # Without these cosine and sine are scaled by 0.1 ln(factor) + 1.
    config.yarn_mscale = config.yarn_mscale_all_dim = None


def scale(model: GPTModel, scaling: Scaling) -> None:
    """Scale the frequencies for llama3; GPTModel's own argument for it fixes all but the factor."""
    if scaling is None or scaling["rope_type"] != "llama3":
        return
    rotary = model.rotary_pos_emb
    rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **{key: scaling[key] for key in SCALING["llama3"]})
