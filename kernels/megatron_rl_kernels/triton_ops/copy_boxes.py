"""copy_boxes in Triton: one program for each tile of a rectangle."""

from collections.abc import Callable, Sequence
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from megatron_rl_kernels import copy_table
from megatron_rl_kernels.copy_table import CopyTable, compile_copy
from megatron_rl_kernels.triton_ops.units import unit_addresses

NUM_WARPS = 4
CAST_VECTOR = tl.constexpr(copy_table.CAST_VECTOR)
CAST_LANES = tl.constexpr(copy_table.CAST_LANES)
UNITS = tl.constexpr(copy_table.UNITS_OF_TILE[1])
CAST_UNITS = tl.constexpr(copy_table.UNITS_OF_TILE[copy_table.CAST_VECTOR])


@triton.jit
def _copy_tile(row, tile, SOURCE: tl.constexpr, DESTINATION: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr):
    """Move UNITS units of LANES elements."""
    unit = tile * UNITS + tl.arange(0, UNITS)
    of, to = unit_addresses(row, unit)
    lane = tl.arange(0, LANES)
    sources = of.to(tl.pointer_type(SOURCE), bitcast=True)[:, None] + lane[None, :]
    destinations = to.to(tl.pointer_type(DESTINATION), bitcast=True)[:, None] + lane[None, :]
    if LANES > 1:  # only the pointers themselves can be promised to be aligned: hints on numbers from memory are lost
        sources = tl.multiple_of(sources, [16, 16])
        destinations = tl.multiple_of(destinations, [16, 16])
    mask = (unit < tl.load(row + 2))[:, None]
    moved = tl.load(sources, mask=mask, cache_modifier=".cg")
    tl.store(destinations, moved.to(DESTINATION), mask=mask, cache_modifier=".cs")


@triton.jit
def copy_kernel(rows, row_of_tile):
    tile = tl.program_id(0)
    row = rows + tl.load(row_of_tile + tile) * 16
    kind = tl.load(row + 11)
    tile -= tl.load(row + 12).to(tl.int32)
    if kind == 16:
        _copy_tile(row, tile, tl.int32, tl.int32, 4, UNITS)
    elif kind == CAST_VECTOR:
        _copy_tile(row, tile, tl.float32, tl.bfloat16, CAST_LANES, CAST_UNITS)
    elif kind == 8:
        _copy_tile(row, tile, tl.int64, tl.int64, 1, UNITS)
    elif kind == 4:
        _copy_tile(row, tile, tl.int32, tl.int32, 1, UNITS)
    elif kind == 2:
        _copy_tile(row, tile, tl.int16, tl.int16, 1, UNITS)
    elif kind == 1:
        _copy_tile(row, tile, tl.int8, tl.int8, 1, UNITS)
    else:
        _copy_tile(row, tile, tl.float32, tl.bfloat16, 1, UNITS)


def launch(table: CopyTable) -> None:
    """Copy, on the current stream."""
    tiles = len(table.tiles.row_of_tile)
    if tiles:
        copy_kernel[(tiles,)](table.tiles.rows, table.tiles.row_of_tile, num_warps=NUM_WARPS)


def prepare(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
    """The copy, its table compiled."""
    return partial(launch, compile_copy(destinations, sources))
