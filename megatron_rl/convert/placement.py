"""Which rectangle of which torch_dist tensor every rectangle of every HF tensor is: layout table times skeleton."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from megatron_rl.errors import LayoutError
from megatron_rl.formats.torch_dist import Piece, Skeleton
from megatron_rl.layouts.boxes import Box, find_overlap
from megatron_rl.layouts.compile import megatron_layouts
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.table import Table
from megatron_rl.models import load_architecture, load_table
from megatron_rl.models.family import HfConfig


@dataclass(frozen=True, slots=True)
class Spot:
    """A rectangle of an HF tensor, and the same elements in the checkpoint's tensor `key`."""

    hf_offset: tuple[int, ...]
    shape: tuple[int, ...]
    """In the HF tensor's dims."""
    key: str
    offset: tuple[int, ...]
    """May have leading dims (layer, expert), of extent 1."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """In the checkpoint's dims."""
        return (1,) * (len(self.offset) - len(self.shape)) + self.shape


@dataclass(frozen=True, slots=True)
class Placement:
    """A model."""

    spots: Mapping[str, tuple[Spot, ...]]
    """By HF name, in the order of rows; every row whole."""
    sizes: Mapping[str, tuple[int, ...]]
    """Of the checkpoint's tensors, without padding."""
    objects: tuple[str, ...]


def find_placement(hf: HfConfig) -> Placement:
    """Imports megatron and makes this process its rank: call it in one that ends afterwards (`workers.Child`)."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # names do not depend on it, and a GPU would be taken for nothing
    import torch

    # megatron decorates functions with it, which imports the compiler for seconds; nothing is computed here.
    torch.compile = lambda function=None, *_, **__: function or (lambda f: f)  # type: ignore[assignment]
    from megatron_rl.trainer.skeleton import skeleton

    table = load_table(hf)
    return place(table, skeleton(load_architecture(hf), _one_rank(table)))


def place(table: Table, skeleton: Skeleton) -> Placement:
    """Raises: LayoutError when table and megatron's model do not have the same tensors."""
    layouts = megatron_layouts(table, _one_rank(table), 0, dtype="")
    if differ := {layout.name for layout in layouts} ^ set(skeleton.pieces):
        raise LayoutError(
            f"The family's table and megatron-core's model differ in {len(differ)} tensors: {sorted(differ)[:10]}. "
            "Mend the table."
        )
    spots: dict[str, list[Spot]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for layout in layouts:
        for piece in skeleton.pieces[layout.name]:
            rows = sum(box.shape[0] for box in layout.boxes) if piece.padded else piece.size[0]
            sizes[piece.key] = (rows, *piece.size[1:])
        for box in layout.boxes:
            spots.setdefault(box.hf, []).extend(_spots(box, skeleton.pieces[layout.name]))
    for own in spots.values():
        own.sort(key=lambda spot: spot.hf_offset)
    _check_cover({key: prod(size) for key, size in sizes.items()}, spots)
    return Placement({name: tuple(own) for name, own in spots.items()}, sizes, skeleton.objects)


def _one_rank(table: Table) -> MegatronTopology:
    return MegatronTopology(world_size=1, num_layers=table.num_layers, mtp_layers=table.mtp_layers)


def _spots(box: Box, pieces: tuple[Piece, ...]) -> Iterator[Spot]:
    for piece in pieces:
        low = tuple(map(max, box.offset, piece.start))
        ends = zip(box.offset, box.shape, piece.start, piece.shape, strict=True)
        shape = tuple(min(a + n, b + m) - start for start, (a, n, b, m) in zip(low, ends, strict=True))
        if min(shape) <= 0:
            continue
        lead = len(piece.offset) - len(piece.shape)
        offset = tuple(o + e - s for o, e, s in zip(piece.offset[lead:], low, piece.start, strict=True))
        hf_offset = tuple(o + e - s for o, e, s in zip(box.hf_offset, low, box.offset, strict=True))
        yield Spot(hf_offset, shape, piece.key, piece.offset[:lead] + offset)


def _check_cover(volumes: dict[str, int], spots: Mapping[str, list[Spot]]) -> None:
    """Every element of the checkpoint comes from one place, whole rows at a time."""
    rectangles: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for name, own in spots.items():
        row = 0
        for spot in own:
            # On one rank every share is whole; a reader of contiguous bytes relies on it.
            assert spot.hf_offset == (row, *(0 for _ in spot.shape[1:])), (name, spot)
            row += spot.shape[0]
            rectangles.setdefault(spot.key, []).append((spot.offset, spot.full_shape))
    for key, volume in volumes.items():
        covered = sum(prod(shape) for _, shape in rectangles[key])
        if covered != volume or find_overlap(rectangles[key]):
            raise LayoutError(f"{key}: the table fills {covered} of {volume} elements. Mend the family's table.")
