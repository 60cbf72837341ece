"""megatron's GPT model, where the families here need it to be another."""

import copy
import logging
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

logger = logging.getLogger(__name__)


class Gpt(GPTModel):
    """Carries multi-token prediction layers without running them: they have no gradient.

    Without labels megatron 0.19 derives some from the tokens and trains these layers on prompts and answers alike.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any):
        super().__init__(config=config, **kwargs)
        self.config: TransformerConfig
        self.without_prediction = copy.copy(config)
        self.without_prediction.mtp_num_layers = None
        if self.mtp_process:
            self.mtp.requires_grad_(False)
            size = sum(p.numel() for p in self.mtp.parameters()) / 1e6
            logger.info("%.3f M parameters for multi-token prediction are carried along and not trained", size)

    def _postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
        # Elsewhere megatron has to know of the layers: it keeps the copy of the embedding beside them up to date.
        config, self.config = self.config, self.without_prediction
        try:
            return super()._postprocess(*args, **{**kwargs, "mtp_in_postprocess": False})
        finally:
            self.config = config


class PlainQueryAttention(MLASelfAttention):
    """Latent attention whose queries have one projection. megatron 0.19 norms its input a second time."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {**super()._resolve_qk_norm_config(submodules), "linear_q_proj": submodules.linear_q_proj}


def layer_specs(config: TransformerConfig, *, vp_stage: int | None) -> dict[str, Any]:
    """The layers of one virtual pipeline chunk, as arguments of `Gpt`."""
    decoder = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    last = get_gpt_decoder_layer_specs(config, use_transformer_engine=True)[-1]
    if isinstance(config, MLATransformerConfig) and config.q_lora_rank is None:
        for layer in (*decoder.layer_specs, last):
            layer.submodules.self_attention.module = PlainQueryAttention
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=True, vp_stage=vp_stage)
    return {"transformer_layer_spec": decoder, "mtp_block_spec": mtp}
