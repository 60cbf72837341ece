"""DeepSeek's FP8 checkpoints, read and written; `layouts/fp8.py` says which tensors are quantised and how.

Tensors are numpy byte arrays at the border: only quantising costs an import of torch.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import ConfigError
from megatron_rl.formats.hf_files import Stored
from megatron_rl.layouts.fp8 import BLOCK, CONFIG, scale_shape
from megatron_rl.models.family import HfConfig

SCALE_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""How numpy reads scales: DeepSeek's are float32, Qwen3's bfloat16 or float16."""


def without_quantization(config: HfConfig) -> HfConfig:
    """The config of the dequantised weights; the same object when they are not quantised.

    Raises: ConfigError for another quantisation than this one.
    """
    found = config.get("quantization_config")
    if not found:
        return config
    if not isinstance(found, dict):
        raise ConfigError(
            f"config.json has quantization_config={found!r}, which is no object: how the weights are quantized is "
            "unknown. Copy it from the original checkpoint."
        )
    method, size = found.get("quant_method"), found.get("weight_block_size")
    if method != "fp8" or size != [BLOCK, BLOCK] or found.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"config.json says the weights are quantized ({method}, blocks {size}): of quantized checkpoints only FP8 "
            f"e4m3 with blocks of {BLOCK} x {BLOCK} can be read. Use the bfloat16 checkpoint."
        )
    return {key: value for key, value in config.items() if key != "quantization_config"}


def wrong_scale(tensor: Stored, scale: Stored) -> str | None:
    """What is wrong with the scales of a tensor."""
    if len(tensor.shape) == 2 and scale.shape == scale_shape(tensor.shape) and scale.dtype in SCALE_TYPES:
        return None
    return (
        f"{scale.name} is {list(scale.shape)} {scale.dtype}, {list(tensor.shape)} in blocks of {BLOCK} take "
        f"{list(scale_shape(tensor.shape))} of {', '.join(SCALE_TYPES)}: it is another tensor's. Take it from the "
        "original checkpoint."
    )


def read_scale(directory: Path, scale: Stored) -> np.ndarray:
    """float32, of the whole tensor."""
    found = np.fromfile(directory / scale.file, SCALE_TYPES[scale.dtype], prod(scale.shape), offset=scale.at)
    if scale.dtype == "bfloat16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32).reshape(scale.shape)


def dequantize(data: np.ndarray, scale: np.ndarray, *, first_row: int, columns: int) -> Iterator[bytes]:
    """bfloat16 bytes of rows `first_row` and on, a row of blocks at a time.

    data: uint8, whole rows; scale: float32, of the whole tensor. numpy's: torch in every worker would take most memory.
    """
    rows, at = data.reshape(-1, columns), 0
    while at < len(rows):
        block, within = divmod(first_row + at, BLOCK)
        part = rows[at : at + BLOCK - within]
        values = E4M3[part]
        values *= np.repeat(scale[block], BLOCK)[:columns]
        bits = values.view(np.uint32)
        bits += 0x7FFF + (bits >> 16 & 1)  # to the nearest, ties to even
        yield (bits >> 16).astype(np.uint16).tobytes()
        at += len(part)


def _e4m3() -> np.ndarray:
    """float32 of each byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, one NaN each way."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + mantissa / 8), 2.0**-6 * mantissa / 8)
    values[127] = np.nan
    return np.concatenate([values, -values], dtype=np.float32)


E4M3 = _e4m3()


def quantize(data: np.ndarray, *, dtype: str, columns: int) -> tuple[bytes, bytes]:
    """(e4m3 bytes, float32 scale bytes) of whole rows, the first of which begins a block. data: uint8."""
    import torch
    from megatron_rl_kernels.reference import quantize_boxes

    values = torch.from_numpy(data).view(getattr(torch, dtype)).view(-1, columns)
    quantized = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(scale_shape(tuple(values.shape)))
    quantize_boxes([quantized], [scale], [[values]])
    return quantized.view(torch.uint8).numpy().tobytes(), scale.numpy().tobytes()


def config_of(config: Mapping[str, Any]) -> HfConfig:
    """config.json of the quantised checkpoint."""
    return {**config, "quantization_config": CONFIG}
