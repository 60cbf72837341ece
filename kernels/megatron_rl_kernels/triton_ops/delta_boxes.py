"""delta_boxes and apply_delta in Triton. Changes are counted, the counts added up, then written: in one order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.errors import LayoutError
from megatron_rl_kernels import reference
from megatron_rl_kernels.boxes import Box, Tiles, boxes_of, one_device, tiles_of
from megatron_rl_kernels.reference import Delta
from megatron_rl_kernels.triton_ops.units import unit_addresses

NUM_WARPS = 4
UNITS = tl.constexpr(256)
CHANGES = tl.constexpr(1024)
"""Of a program: units compared, changes applied."""
LANES, FIRST_TILE = 11, 12
"""Columns of a row; all: those of Box.units, elements of a unit, first tile, and three unused."""
TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass(frozen=True, slots=True)
class DeltaTable:
    """Pairs of rectangles."""

    tiles: Tiles
    first_tiles: Tensor
    """int64 [pairs + 1]."""
    dtype: torch.dtype
    """Of the tensors."""
    tensors: tuple[Tensor, ...]
    """Kept alive, for the table has their addresses."""


def _box(destination: Tensor, source: Tensor) -> Box | None:
    boxes = list(boxes_of(destination, source))
    if len(boxes) > 1:
        raise LayoutError(
            f"A view of shape {list(destination.shape)} and strides {list(destination.stride())} has more than three "
            "dims that are not contiguous: a delta numbers the elements of at most three. Cut it along the first."
        )
    return boxes[0] if boxes else None


def _row(box: Box | None, lanes: int) -> list[int]:
    return [*(box.units(lanes) if box else [0] * LANES), lanes, 0, 0, 0, 0]


def compile_delta(current: Sequence[Tensor], previous: Sequence[Tensor]) -> DeltaTable:
    """Raises: LayoutError as `reference.delta_boxes`, or for a view of more than three dims that are not contiguous."""
    dtype, _ = reference.check_delta(current, previous)
    wide = 16 // dtype.itemsize
    boxes = [_box(old, new) for new, old in zip(current, previous, strict=True)]
    rows = [_row(box, wide if box and box.divides(wide) else 1) for box in boxes]
    counts = [triton.cdiv(row[2], UNITS.value) for row in rows]
    tiles = tiles_of(rows, counts, one_device(current), first_tile=FIRST_TILE)
    ends = torch.tensor([0, *counts]).cumsum(0).to(tiles.rows.device)
    return DeltaTable(tiles, ends, dtype, (*current, *previous))


@triton.jit
def _changes(row, tile, TYPE: tl.constexpr, LANES: tl.constexpr):
    """Of a tile [UNITS, LANES]: index of the first lane, bits, and whether they differ."""
    unit = tile * UNITS + tl.arange(0, UNITS)
    of, to = unit_addresses(row, unit)
    lane = tl.arange(0, LANES)
    new = of.to(tl.pointer_type(TYPE), bitcast=True)[:, None] + lane[None, :]
    old = to.to(tl.pointer_type(TYPE), bitcast=True)[:, None] + lane[None, :]
    if LANES > 1:
        new, old = tl.multiple_of(new, [16, 16]), tl.multiple_of(old, [16, 16])
    mask = (unit < tl.load(row + 2))[:, None]
    bits = tl.load(new, mask=mask, other=0)
    changed = (bits != tl.load(old, mask=mask, other=0)).to(tl.int32)
    return unit * LANES, bits, changed


@triton.jit
def _count(row, tile, count, TYPE: tl.constexpr, LANES: tl.constexpr):
    _, _, changed = _changes(row, tile, TYPE, LANES)
    tl.store(count, tl.sum(tl.sum(changed, axis=1), axis=0))


@triton.jit
def _write(row, tile, indices, values, TYPE: tl.constexpr, LANES: tl.constexpr):
    first, bits, changed = _changes(row, tile, TYPE, LANES)
    of_unit = tl.sum(changed, axis=1)
    rank = (tl.cumsum(of_unit, axis=0) - of_unit)[:, None] + tl.cumsum(changed, axis=1) - changed
    tl.store(indices + rank, first[:, None] + tl.arange(0, LANES)[None, :], mask=changed != 0)
    tl.store(values + rank, bits, mask=changed != 0)


@triton.jit
def count_kernel(rows, row_of_tile, counts, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """counts: int32, of each tile."""
    program = tl.program_id(0)
    row = rows + tl.load(row_of_tile + program) * 16
    tile = program - tl.load(row + 12).to(tl.int32)
    if tl.load(row + 11) == WIDE:
        _count(row, tile, counts + program, TYPE, WIDE)
    else:
        _count(row, tile, counts + program, TYPE, 1)


@triton.jit
def write_kernel(rows, row_of_tile, ends, indices, values, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """ends: int64, changes before each tile."""
    program = tl.program_id(0)
    row = rows + tl.load(row_of_tile + program) * 16
    tile = program - tl.load(row + 12).to(tl.int32)
    before = tl.load(ends + program)
    if tl.load(ends + program + 1) > before:
        if tl.load(row + 11) == WIDE:
            _write(row, tile, indices + before, values + before, TYPE, WIDE)
        else:
            _write(row, tile, indices + before, values + before, TYPE, 1)


@triton.jit
def apply_kernel(rows, runs, row_of_tile, indices, values, TYPE: tl.constexpr):
    """runs: int64 [rows, 3], the first change of a row, changes, first tile."""
    program = tl.program_id(0)
    number = tl.load(row_of_tile + program)
    run = runs + number * 3
    change = (program - tl.load(run + 2).to(tl.int32)) * CHANGES + tl.arange(0, CHANGES)
    mask = change < tl.load(run + 1)
    at = tl.load(run) + change
    _, to = unit_addresses(rows + number * 16, tl.load(indices + at, mask=mask, other=0))
    tl.store(to.to(tl.pointer_type(TYPE), bitcast=True), tl.load(values + at, mask=mask, other=0), mask=mask)


def launch(table: DeltaTable) -> Delta:
    """Find the changes, on the current stream, which it waits for once, to know how many there are."""
    rows, row_of_tile, size = table.tiles.rows, table.tiles.row_of_tile, table.dtype.itemsize
    device, programs = rows.device, len(row_of_tile)
    counts = torch.zeros(programs, dtype=torch.int32, device=device)
    if programs:
        count_kernel[(programs,)](rows, row_of_tile, counts, TYPES[size], 16 // size, num_warps=NUM_WARPS)
    ends = torch.zeros(programs + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=ends[1:])
    of_pairs = ends[table.first_tiles].diff().cpu()
    total = int(of_pairs.sum())
    indices = torch.empty(total, dtype=torch.int32, device=device)
    values = torch.empty(total, dtype=reference.INTEGERS[size], device=device)
    if total:
        write_kernel[(programs,)](
            rows, row_of_tile, ends, indices, values, TYPES[size], 16 // size, num_warps=NUM_WARPS
        )
    return Delta(of_pairs, indices, values.view(table.dtype))


def prepare(current: Sequence[Tensor], previous: Sequence[Tensor]) -> Callable[[], Delta]:
    """delta_boxes, its table compiled."""
    return partial(launch, compile_delta(current, previous))


def launch_apply(destinations: Sequence[Tensor], rows: Tensor, delta: Delta) -> None:
    """Write the changes, on the current stream. `rows`: of the destinations, as `prepare_apply` makes them."""
    reference.check_apply(destinations, delta)
    before = (delta.counts.cumsum(0) - delta.counts).tolist()
    counts = delta.counts.tolist()
    runs = [[start, count, 0] for start, count in zip(before, counts, strict=True)]
    tiles = tiles_of(runs, [triton.cdiv(count, CHANGES.value) for count in counts], rows.device, first_tile=2)
    if len(tiles.row_of_tile):
        size = delta.values.element_size()
        bits = delta.values.view(reference.INTEGERS[size])
        apply_kernel[(len(tiles.row_of_tile),)](
            rows, tiles.rows, tiles.row_of_tile, delta.indices, bits, TYPES[size], num_warps=NUM_WARPS
        )


def prepare_apply(destinations: Sequence[Tensor]) -> Callable[[Delta], None]:
    """apply_delta, the destinations compiled."""
    rows = torch.tensor([_row(_box(t, t), 1) for t in destinations], dtype=torch.int64)
    return partial(launch_apply, list(destinations), rows.to(one_device(destinations)))
