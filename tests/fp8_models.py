"""Small models for engines in FP8, and their checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.convert import fp8
from megatron_rl.formats.hf_files import read_hf_config
from megatron_rl.layouts.fp8 import SCALE, is_quantized, scale_shape
from megatron_rl.models.random_checkpoint import write_random_checkpoint
from tests.tiny import CHARACTERS, TINY

FP8: dict[str, dict[str, Any]] = {
    "deepseek_v3": TINY["deepseek_v3"]
    | {
        "hidden_size": 152,
        "first_k_dense_replace": 2,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
    }
    | {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 96}
    | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_experts_per_tok": 2}
    | {"n_group": 2, "topk_group": 1},
    "qwen3_moe": TINY["qwen3_moe"]
    | {"hidden_size": 136, "moe_intermediate_size": 256, "num_experts": 6}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "qwen3": TINY["qwen3"]
    | {"hidden_size": 264, "intermediate_size": 512}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
}
"""For engines in FP8: at tp 2, and mostly at tp 4, SGLang cuts between blocks of 128, within which other sizes end.

The keys of a group of Qwen3 are half a block."""
ENGINES: dict[str, list[dict[str, Any]]] = {
    "deepseek_v3": [
        {},
        {"tp": 2},
        {"tp": 2, "ep": 2, "dp_attention": 2},
        {"tp": 4, "ep": 2, "dp_attention": 2, "moe_dense_tp": 1},
    ],
    "qwen3_moe": [{}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 2, "ep": 2, "dp_attention": 2}],
    "qwen3": [{}, {"tp": 2}],
}


def in_fp8(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint as `export --fp8` writes it."""
    made = dict(held)
    for name, tensor in held.items():
        if is_quantized(name, tuple(tensor.shape)):
            data = tensor.view(torch.uint8).numpy().reshape(-1)
            dtype = str(tensor.dtype).removeprefix("torch.")
            both = fp8.quantize(data, dtype=dtype, columns=tensor.shape[1])
            weights, scales = (torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in both)
            made[name] = weights.view(torch.float8_e4m3fn).view(tensor.shape)
            made[name + SCALE] = scales.view(torch.float32).view(scale_shape(tensor.shape))
    return made


def write_both(plain: Path, quantized: Path, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A random checkpoint in bfloat16, and the same in FP8. Returns: their tensors."""
    write_random_checkpoint(plain, config, characters=CHARACTERS, seed=5, jitter=0.2)
    held = load_file(plain / "model.safetensors")
    shutil.copytree(plain, quantized)
    made = in_fp8(held)
    save_file(made, quantized / "model.safetensors")
    (quantized / "config.json").write_text(json.dumps(fp8.config_of(read_hf_config(plain))))
    return held, made
