"""Mends the casts of Triton's interpreter; see triton's pull request 11897."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

CASTS = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
}


def mend() -> None:
    """float32 to bfloat16 and to e4m3 as a GPU does it: to nearest, ties to even. Triton 3.8 cuts off the first and
    misrounds the second."""
    original = triton_interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in CASTS or rounding == triton_interpreter._ir.ROUNDING_MODE.RTZ:
            return original(values, source, target, rounding)
        dtype, integer, bits = CASTS[target]
        floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
        if target == tl.float8e4nv:  # cvt.rn.satfinite, whose NaN is 0x7f
            floats = floats.clamp(-448, 448).masked_fill(floats.isnan(), torch.nan)
        return floats.to(dtype).view(integer).numpy().view(bits).reshape(values.shape)

    triton_interpreter._convert_float = convert
