"""quantize_boxes in Triton: one program for each block of 128 x 128."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_rl_kernels import reference
from megatron_rl_kernels.quantize_table import QuantizeTable, preparing

BLOCK = tl.constexpr(reference.BLOCK)
SLICE = tl.constexpr(32)
NUM_WARPS = 8
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _pointers(row, lines, first, left, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, LINES: tl.constexpr):
    """Where LINES lines of a block lie on both sides, and which of their elements exist."""
    high, wide = tl.load(row + 1), tl.load(row + 2)
    line = first + tl.arange(0, LINES)
    column = tl.arange(0, BLOCK)
    of = tl.load(lines + tl.load(row) + line, mask=line < high, other=0)
    to = (tl.load(row + 4) + line * tl.load(row + 5)).to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    if ALIGNED:
        of = (of + left * (SOURCE.primitive_bitwidth // 8)).to(tl.pointer_type(SOURCE), bitcast=True)
        # Only the pointers themselves can be promised to be aligned: hints on numbers from memory are lost.
        sources = tl.multiple_of(of[:, None] + column[None, :], [16, 16])
        destinations = tl.multiple_of((to + left)[:, None] + column[None, :], [16, 16])
        # The same for 16 neighbours, which is how the compiler sees that they need one mask.
        is_column = column // 16 < (wide - left) // 16
    else:
        sources = (of[:, None] + (left + column)[None, :] * tl.load(row + 3)).to(tl.pointer_type(SOURCE), bitcast=True)
        destinations = to[:, None] + (left + column)[None, :] * tl.load(row + 6)
        is_column = column < wide - left
    return sources, destinations, (line < high)[:, None] & is_column[None, :]


@triton.jit
def _largest(values):
    """Bits of the largest absolute value; as integers, where a NaN is above infinity."""
    bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(bits, axis=1), axis=0)


@triton.jit
def _scale(bits, POWER_OF_TWO: tl.constexpr):
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
    scale = tl.where(largest == 0, 1.0, scale)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(largest != largest, float("nan"), scale)


@triton.jit
def quantize_kernel(rows, row_of_tile, lines, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    tile = tl.program_id(0)
    row = rows + tl.load(row_of_tile + tile) * 16
    blocks_wide = tl.load(row + 10).to(tl.int32)
    tile -= tl.load(row + 11).to(tl.int32)
    block_line, block_column = (tile // blocks_wide).to(tl.int64), (tile % blocks_wide).to(tl.int64)
    first, left = block_line * BLOCK, block_column * BLOCK
    if ALIGNED:  # each element is read once and waits in a register for the scale
        sources, destinations, mask = _pointers(row, lines, first, left, SOURCE, True, BLOCK)
        values = tl.load(sources, mask=mask, other=0.0)
        scale = _scale(_largest(values), POWER_OF_TWO)
        tl.store(destinations, tl.div_rn(values.to(tl.float32), scale).to(tl.float8e4nv), mask=mask)
    else:  # read twice: 64-bit pointers to each element leave no registers
        bits = tl.zeros((), tl.int32)
        for part in range(0, BLOCK, SLICE):
            sources, destinations, mask = _pointers(row, lines, first + part, left, SOURCE, False, SLICE)
            bits = tl.maximum(bits, _largest(tl.load(sources, mask=mask, other=0.0)))
        scale = _scale(bits, POWER_OF_TWO)
        for part in range(0, BLOCK, SLICE):
            sources, destinations, mask = _pointers(row, lines, first + part, left, SOURCE, False, SLICE)
            values = tl.load(sources, mask=mask, other=0.0).to(tl.float32)
            tl.store(destinations, tl.div_rn(values, scale).to(tl.float8e4nv), mask=mask)
    at = block_line * tl.load(row + 8) + block_column * tl.load(row + 9)
    tl.store(tl.load(row + 7).to(tl.pointer_type(tl.float32), bitcast=True) + at, scale)


def launch(tables: Sequence[QuantizeTable]) -> None:
    """Quantize, on the current stream."""
    for t in tables:
        arguments = (t.tiles.rows, t.tiles.row_of_tile, t.lines, DTYPES[t.dtype], t.aligned, t.power_of_two)
        quantize_kernel[(len(t.tiles.row_of_tile),)](*arguments, num_warps=NUM_WARPS)


prepare = preparing(launch)
