"""Which tensors are kept in FP8 and how: e4m3, one float32 scale for each block of 128 x 128 elements, as DeepSeek's.

Source of the format: inference/kernel.py and fp8_cast_bf16.py of the DeepSeek-V3 repository: w = fp8 * scale_inv.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import Box, TensorLayout
from megatron_rl.layouts.terms import Local, Rectangle

DTYPE, SCALE, BLOCK = "float8_e4m3fn", "_scale_inv", 128
"""Of the elements; what the name of a tensor's scales ends with; rows and columns that share a scale."""
SCALE_BYTES = 4
CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
"""`quantization_config` in config.json."""
_QUANTIZED = re.compile(r"\.layers\.\d+\..*(_proj|_proj_with_mqa|\.w[123])\.weight$")


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether DeepSeek keeps this HF tensor in FP8: linears of attention, MLPs and experts; no norms, routers, ends."""
    return len(shape) == 2 and _QUANTIZED.search(name) is not None and "eh_proj" not in name


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of the scales of a tensor of this shape."""
    return tuple(-(-n // BLOCK) for n in shape)


def scale_offset(offset: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Of the scales of a rectangle at `offset`, the first numbers of which may be slots."""
    lead = len(offset) - len(shape)
    return *offset[:lead], *(n // BLOCK for n in offset[lead:])


def with_scales(layouts: Iterable[TensorLayout]) -> tuple[TensorLayout, ...]:
    """The same, each tensor in FP8 followed by its scales: as a rank has them, where plans know the first only."""
    all_: list[TensorLayout] = []
    for layout in layouts:
        all_.append(layout)
        if layout.dtype == DTYPE:
            lead = len(layout.shape) - 2
            shape = (*layout.shape[:lead], *scale_shape(layout.shape[lead:]))
            boxes = tuple(_scale_box(box) for box in layout.boxes)
            all_.append(replace(layout, name=layout.name + SCALE, shape=shape, dtype="float32", boxes=boxes))
    return tuple(all_)


def _scale_box(box: Box) -> Box:
    offsets = scale_offset(box.hf_offset, box.shape), scale_offset(box.offset, box.shape)
    return Box(box.hf + SCALE, *offsets, scale_shape(box.shape))


def check_blocks(piece: Local, name: str, keys: Sequence[str]) -> None:
    """Refuse a rank's tensor with part of a block, or with a block that is not one there. `keys` cut it.

    Raises: LayoutError.
    """
    row = 0
    for r in piece.rectangles:
        ends = [(start + n, whole) for start, n, whole in zip(r.offset, r.shape, r.tensor.shape, strict=True)]
        is_whole = not any(start % BLOCK for start in r.offset) and all(not e % BLOCK or e == n for e, n in ends)
        if not is_whole or row % BLOCK:
            span = ", ".join(f"{start}:{end}" for start, (end, _) in zip(r.offset, ends, strict=True))
            mend = (
                f"Lower {' or '.join(dict.fromkeys(keys))}{_legal(r)}, or set it to false."
                if keys
                else "Set it to false."
            )
            raise LayoutError(
                f"rollout.fp8=true: {r.tensor.name} {list(r.tensor.shape)} is kept in blocks of {BLOCK} x {BLOCK}, and "
                f"a rank has [{span}] of it at row {row} of {name}: blocks would be cut, which SGLang refuses too. "
                + mend
            )
        row += r.shape[0]


def _legal(held: Rectangle) -> str:
    """Into how many equal shares, fewer than now, the tensor that a rank has a part of can be cut."""
    for n, whole in zip(held.shape, held.tensor.shape, strict=True):
        if n != whole:
            blocks = 1 if whole % BLOCK else whole // BLOCK
            return f" to one of {', '.join(str(i) for i in range(1, whole // n) if blocks % i == 0)}"
    return ""
