"""Rectangles of memory, as the kernels' tables describe them; compiled once from views whose addresses stay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from megatron_rl.errors import LayoutError

MAX_ELEMENTS = 2**31 - 1024
"""Of one rectangle: kernels number its units with 32 bits, those too that only fill up the last tile."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle that lies at both places with the same shape."""

    shape: tuple[int, int, int]
    """The first ones are 1 where there are fewer dims."""
    destination: int
    source: int
    """Addresses."""
    destination_strides: tuple[int, int, int]
    source_strides: tuple[int, int, int]
    """Bytes."""
    destination_size: int
    source_size: int
    """Bytes of an element."""

    def divides(self, lanes: int) -> bool:
        """Whether `lanes` elements at a time can be moved by aligned accesses of up to 16 bytes."""
        if self.shape[2] % lanes or (self.destination_strides[2], self.source_strides[2]) != (
            self.destination_size,
            self.source_size,
        ):
            return False
        to, of = (self.destination, *self.destination_strides[:2]), (self.source, *self.source_strides[:2])
        to_bytes, of_bytes = min(16, lanes * self.destination_size), min(16, lanes * self.source_size)
        return not any(at % to_bytes for at in to) and not any(at % of_bytes for at in of)

    def units(self, lanes: int) -> list[int]:
        """The columns by which triton_ops/units.py finds units of `lanes` neighbours.

        Addresses of source and destination; units in all, of the middle dim, of the inner dim; bytes from unit to unit
        along each of three dims in the source, then in the destination.
        """
        outer, middle, inner = self.shape[0], self.shape[1], self.shape[2] // lanes
        steps = [[*s[:2], s[2] * lanes] for s in (self.source_strides, self.destination_strides)]
        return [self.source, self.destination, outer * middle * inner, middle, inner, *steps[0], *steps[1]]


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a kernel with one program for each tile looks up: rows of numbers, and which row each tile belongs to."""

    rows: Tensor
    """int64 [rows, columns of the kernel]; one column holds the row's first tile."""
    row_of_tile: Tensor
    """int32 [tiles]."""


def check_pairs(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.device:
    """The device of all of them.

    Raises: LayoutError when the shapes of a pair differ, or the tensors lie on several devices.
    """
    if len(destinations) != len(sources):
        raise LayoutError(f"{len(destinations)} destinations for {len(sources)} sources: give as many of each.")
    for i, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        if destination.shape != source.shape:
            raise LayoutError(
                f"Pair {i}: destination {list(destination.shape)}, source {list(source.shape)}: a copy needs equal "
                "shapes. Take views of one shape."
            )
    return one_device([*destinations, *sources])


def one_device(tensors: Sequence[Tensor]) -> torch.device:
    """Raises: LayoutError when they lie on several."""
    devices = {t.device for t in tensors}
    if len(devices) != 1:
        raise LayoutError(
            f"Tensors of one call lie on {sorted(map(str, devices))}: a kernel runs on one. Copy them there first."
        )
    return devices.pop()


def boxes_of(destination: Tensor, source: Tensor) -> Iterator[Box]:
    """The rectangle of a pair of views of equal shape, dims that are contiguous on both sides merged.

    One Box where at most three dims remain, else one for each index of the others; none for no elements.
    Raises: LayoutError above MAX_ELEMENTS.
    """
    if destination.numel() > MAX_ELEMENTS:
        raise LayoutError(f"A rectangle of {destination.numel()} elements is above {MAX_ELEMENTS}: cut it in two.")
    if not destination.numel():
        return
    dims: list[tuple[int, int, int]] = []  # size, stride of destination, of source
    for n, to, of in zip(destination.shape, destination.stride(), source.stride(), strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1:] == (n * to, n * of):
            dims[-1] = (dims[-1][0] * n, to, of)
        else:
            dims.append((n, to, of))
    dims = dims or [(1, 1, 1)]
    dims = [(1, 0, 0)] * (3 - len(dims)) + dims
    to_size, of_size = destination.element_size(), source.element_size()
    outer, (first, second, third) = dims[:-3], dims[-3:]
    for index in product(*(range(n) for n, _, _ in outer)):
        yield Box(
            shape=(first[0], second[0], third[0]),
            destination=destination.data_ptr() + sum(i * d[1] for i, d in zip(index, outer, strict=True)) * to_size,
            source=source.data_ptr() + sum(i * d[2] for i, d in zip(index, outer, strict=True)) * of_size,
            destination_strides=(first[1] * to_size, second[1] * to_size, third[1] * to_size),
            source_strides=(first[2] * of_size, second[2] * of_size, third[2] * of_size),
            destination_size=to_size,
            source_size=of_size,
        )


def tiles_of(rows: Sequence[Sequence[int]], counts: Sequence[int], device: torch.device, *, first_tile: int) -> Tiles:
    """A table of `rows`, the i-th with counts[i] tiles; column `first_tile` is written here."""
    table = np.array(rows, np.int64).reshape(len(rows), -1)
    ends = np.cumsum(counts)
    table[:, first_tile] = ends - counts
    row_of_tile = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    return Tiles(torch.from_numpy(table).to(device), torch.from_numpy(row_of_tile).to(device))
