"""The table of copy_boxes, which its Triton and its CUDA kernel share: a row for each rectangle, one launch for all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import LayoutError
from megatron_rl_kernels.boxes import Tiles, boxes_of, check_pairs, tiles_of

WIDTHS = (16, 8, 4, 2, 1)
"""Bytes of a unit where dtypes are equal: the widest that divides addresses, strides and inner length."""
CAST_VECTOR, CAST_ELEMENT = 32, 33
"""Kinds of rows that round float32 to bfloat16: units of eight elements, or of one. The other kinds are WIDTHS."""
CAST_LANES = 8
UNITS_OF_TILE = {**dict.fromkeys(WIDTHS, 1024), CAST_VECTOR: 256, CAST_ELEMENT: 1024}
"""A program's share: 16 KiB where units are widest."""
UNITS, KIND, FIRST_TILE = 2, 11, 12
"""Columns of a row; all: those of Box.units, kind, first tile, and three unused."""


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Which bytes go where."""

    tiles: Tiles
    tensors: tuple[Tensor, ...]
    """Kept alive, for the table has their addresses."""


def compile_copy(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> CopyTable:
    """Raises: LayoutError for shapes that differ, several devices, or a cast other than float32 to bfloat16."""
    device = check_pairs(destinations, sources)
    rows = [row for pair in zip(destinations, sources, strict=True) for row in _rows(*pair)]
    counts = [-(-row[UNITS] // UNITS_OF_TILE[row[KIND]]) for row in rows]
    return CopyTable(tiles_of(rows, counts, device, first_tile=FIRST_TILE), (*destinations, *sources))


def _rows(destination: Tensor, source: Tensor) -> Iterator[list[int]]:
    size = destination.element_size()
    for box in boxes_of(destination, source):
        if destination.dtype == source.dtype:
            lanes = next((w // size for w in WIDTHS if w > size and box.divides(w // size)), 1)
            kind = lanes * size
        elif (source.dtype, destination.dtype) == (torch.float32, torch.bfloat16):
            lanes = CAST_LANES if box.divides(CAST_LANES) else 1
            kind = CAST_VECTOR if lanes > 1 else CAST_ELEMENT
        else:
            raise LayoutError(
                f"A copy from {source.dtype} to {destination.dtype}: kernels copy equal dtypes and round float32 to "
                "bfloat16. Convert the source first."
            )
        yield [*box.units(lanes), kind, 0, 0, 0, 0]
