"""Engines in FP8 without a GPU: weights lie as on one, and each call computes in bfloat16 with what they stand for.

On a GPU activations are quantized too, so log-probabilities differ there a little more from the trainer's.
"""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

METHODS = "sglang.srt.layers.quantization.fp8"


def activate_fp8() -> None:
    """Register it."""
    fp8._is_cpu = False  # it would pack weights for AMX kernels
    # As on a GPU, latent attention's matrices are made in bfloat16; else they are quantized as a whole.
    deepseek_weight_loader._is_xpu = True
    HookRegistry.register(f"{METHODS}.Fp8LinearMethod.apply", _multiply, HookType.REPLACE)
    HookRegistry.register(f"{METHODS}.Fp8MoEMethod.apply", _ask_experts, HookType.REPLACE)


def _in_full(method: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return block_quant_dequant(weight, scale, method.weight_block_size, torch.bfloat16)


def _multiply(method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, _in_full(method, layer.weight, layer.weight_scale_inv), bias)  # type: ignore[arg-type]


def _ask_experts(method: Any, layer: torch.nn.Module, dispatch_output: Any) -> StandardCombineInput:
    experts = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=_in_full(method, layer.w13_weight, layer.w13_weight_scale_inv),  # type: ignore[arg-type]
        w2_weight=_in_full(method, layer.w2_weight, layer.w2_weight_scale_inv),  # type: ignore[arg-type]
    )
    x, routed = dispatch_output.hidden_states, dispatch_output.topk_output
    return StandardCombineInput(hidden_states=moe_forward_native(experts, x, routed, method.moe_runner_config))
