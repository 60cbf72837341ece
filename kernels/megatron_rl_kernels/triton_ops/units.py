"""Where the units of a rectangle lie: what copies and deltas share."""

import triton
import triton.language as tl


@triton.jit
def unit_addresses(row, unit):
    """Addresses of units in the source and in the destination; `row` is of Box.units, `unit` int32, row-major."""
    middle_size = tl.load(row + 3).to(tl.uint32)
    inner_size = tl.load(row + 4).to(tl.uint32)
    inner = (unit.to(tl.uint32) % inner_size).to(tl.int64)
    rest = unit.to(tl.uint32) // inner_size
    middle = (rest % middle_size).to(tl.int64)
    outer = (rest // middle_size).to(tl.int64)
    of = tl.load(row) + outer * tl.load(row + 5) + middle * tl.load(row + 6) + inner * tl.load(row + 7)
    to = tl.load(row + 1) + outer * tl.load(row + 8) + middle * tl.load(row + 9) + inner * tl.load(row + 10)
    return of, to
