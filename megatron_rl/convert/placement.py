"""Which rectangle of which torch_dist tensor every rectangle of every HF tensor is."""

import os
import re
from collections import Counter
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

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.weight(\d+)$")


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


def find_placement(hf: HfConfig) -> Placement:
    """From the config alone, as the megatron-core that requirements/ pins names things: `check_placement` asks it."""
    table = load_table(hf)
    # megatron keeps layers apart where moe_layer_freq lists which have experts, and stacks them elsewhere.
    stacked = 0 if "moe_layer_freq" in load_architecture(hf).megatron else table.num_layers
    layouts = megatron_layouts(table, _one_rank(table), 0, dtype="")
    experts = Counter(prefix for layout in layouts if (prefix := _EXPERT.sub("", layout.name)) != layout.name)
    spots: dict[str, list[Spot]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for layout in layouts:
        key, lead = _key(layout.name, stacked, experts)
        rows = sum(box.shape[0] for box in layout.boxes)  # those of the layout may be padded
        sizes[key] = (*(extent for _, extent in lead), rows, *layout.shape[1:])
        for box in layout.boxes:
            offset = (*(place for place, _ in lead), *box.offset)
            spots.setdefault(box.hf, []).append(Spot(box.hf_offset, box.shape, key, offset))
    for own in spots.values():
        own.sort(key=lambda spot: spot.hf_offset)
    _check_cover({key: prod(size) for key, size in sizes.items()}, spots)
    return Placement({name: tuple(own) for name, own in spots.items()}, sizes)


def _key(name: str, stacked: int, experts: Mapping[str, int]) -> tuple[str, list[tuple[int, int]]]:
    """(what the checkpoint calls a tensor of the layout table, where it lies in each leading dim and that dim's extent)

    stacked: layers that are one tensor of the checkpoint. experts: how many each prefix has.
    """
    key, lead = name.removeprefix("0:").replace(".mtp_model_layer.", ".transformer_layer."), []
    if stacked and (layer := _LAYER.match(key)):
        key = "decoder.layers." + key[layer.end() :]
        lead.append((int(layer[1]), stacked))
    if expert := _EXPERT.search(key):
        key = key[: expert.start()].replace(".experts.", ".experts.experts.") + ".weight"
        lead.append((int(expert[1]), experts[_EXPERT.sub("", name)]))
    return key, lead


def check_placement(hf: HfConfig, placement: Placement) -> tuple[str, ...]:
    """Returns: keys of what is no tensor in the checkpoint.

    Raises: LayoutError when megatron-core keeps the model's tensors elsewhere than `placement` says.
    Imports megatron and makes this process its rank: call it in one that ends afterwards (`workers.Child`).
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # names do not depend on it, and a GPU would be taken for nothing
    import torch

    # megatron decorates functions with it, which imports the compiler for seconds; nothing is computed here.
    torch.compile = lambda function=None, *_, **__: function or (lambda f: f)  # type: ignore[assignment]
    from megatron_rl.trainer.skeleton import skeleton

    table = load_table(hf)
    theirs = skeleton(load_architecture(hf), _one_rank(table))
    compare(placement, place(table, theirs))
    return theirs.objects


def compare(ours: Placement, theirs: Placement) -> None:
    """Raises: LayoutError naming tensors of which megatron-core says something else than `find_placement`."""
    differing = [name for name in {**ours.spots, **theirs.spots} if ours.spots.get(name) != theirs.spots.get(name)]
    differing += [key for key in {**ours.sizes, **theirs.sizes} if ours.sizes.get(key) != theirs.sizes.get(key)]
    if differing:
        raise LayoutError(
            f"megatron-core keeps {len(differing)} tensors of the model elsewhere than convert/placement.py says "
            f"({', '.join(differing[:10])}): stock megatron-core would not find them. Use the megatron-core that "
            "requirements/ pins, or mend `_key` there."
        )


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
    return Placement({name: tuple(own) for name, own in spots.items()}, sizes)


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
    rectangles: dict[tuple[str, tuple[int, ...]], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    covered: Counter[str] = Counter()
    for name, own in spots.items():
        row = 0
        for spot in own:
            # On one rank every share is whole; a reader of contiguous bytes relies on it.
            assert spot.hf_offset == (row, *(0 for _ in spot.shape[1:])), (name, spot)
            row += spot.shape[0]
            lead = len(spot.offset) - len(spot.shape)  # extents of 1: what differs there does not overlap
            rectangles.setdefault((spot.key, spot.offset[:lead]), []).append((spot.offset[lead:], spot.shape))
            covered[spot.key] += prod(spot.shape)
    overlaps = {key for (key, _), own in rectangles.items() if find_overlap(own)}
    for key, volume in volumes.items():
        if covered[key] != volume or key in overlaps:
            raise LayoutError(f"{key}: the table fills {covered[key]} of {volume} elements. Mend the family's table.")
