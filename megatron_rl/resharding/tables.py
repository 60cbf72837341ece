"""The boxes of all ranks as arrays, and where those of the two sides meet. The proofs of a plan are made here.

N boxes, D dims (of the HF tensor that has most; those with fewer get dims of extent 1), F fragments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.errors import LayoutError
from megatron_rl.layouts import fp8
from megatron_rl.layouts.boxes import NBYTES, Box, TensorLayout

Layouts = Mapping[int, Sequence[TensorLayout]]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Every box of every rank of one side; a tensor that several ranks have as one object is in it once."""

    boxes: list[Box]
    tensors: list[TensorLayout]
    tensors_of: dict[int, list[int]]
    """Rank -> its tensors, in order."""
    first: np.ndarray
    """[tensors + 1] the first box of each tensor."""
    tensor: np.ndarray
    """[N] the tensor of each box."""
    area: np.ndarray
    """[N] the distinct area of each box."""
    areas: "Areas"

    def boxes_of(self, rank: int) -> dict[int, list[int]]:
        """Area -> boxes of `rank` that hold it, in the order of its tensors."""
        found: dict[int, list[int]] = {}
        for t in self.tensors_of[rank]:
            for box in range(self.first[t], self.first[t + 1]):
                found.setdefault(int(self.area[box]), []).append(box)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Areas:
    """Distinct rectangles of HF tensors, each with the ranks that hold it. K areas."""

    hf: np.ndarray
    """[K] number of the HF tensor."""
    start: np.ndarray
    """[K, D]."""
    size: np.ndarray
    """[K, D]."""
    itemsize: np.ndarray
    """[K] bytes of an element."""
    block: np.ndarray
    """[K] rows and columns that share a scale, which travels with them and is not cut; 1 where there are no scales."""
    box: np.ndarray
    """[K] a box of it: the first."""
    ranks: np.ndarray
    """[K] number of the set of ranks."""
    sets: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Every wanted element once: the fragments in which a source's area meets a wanted one."""

    source: Side
    target: Side
    piece: np.ndarray
    """[F] area of the source."""
    want: np.ndarray
    """[F] area of the target."""
    start: np.ndarray
    """[F, D] in the HF tensor."""
    size: np.ndarray
    """[F, D]."""
    nbytes: np.ndarray
    """[F] in the target's dtype, with scales."""

    def key(self) -> np.ndarray:
        """[F] number of (set of ranks that hold it, set of ranks that want it)."""
        held, wanted = self.source.areas.ranks[self.piece], self.target.areas.ranks[self.want]
        return np.asarray(held * len(self.target.areas.sets) + wanted)


def join(sources: Layouts, targets: Layouts) -> Joined:
    """Fragments in the order of the sources' HF tensors.

    Raises: LayoutError when an element has no source, two unlike sources, or two boxes of one target tensor.
    """
    dims = max((len(b.shape) for side in (sources, targets) for t in distinct(side) for b in t.boxes), default=1)
    numbers: dict[str, int] = {}
    source, target = (_read(side, numbers, dims, by_dtype=side is targets) for side in (sources, targets))
    _check_sources(source)
    _check_targets(target)
    have, wanted = source.areas, target.areas
    piece, want = _meet(have.hf, have.start, have.size, wanted.hf, wanted.start, wanted.size)
    start = np.maximum(have.start[piece], wanted.start[want])
    size = np.minimum(have.start[piece] + have.size[piece], wanted.start[want] + wanted.size[want]) - start
    elements = size.prod(1)
    # The areas of the source are disjoint, so counting elements proves exact cover.
    missing = wanted.size.prod(1) - np.bincount(want, elements, len(wanted.hf)).astype(np.int64)
    if missing.any():
        area = int(np.flatnonzero(missing)[0])
        box, layout = target.boxes[wanted.box[area]], target.tensors[target.tensor[wanted.box[area]]]
        raise LayoutError(
            f"{layout.name} on destination rank {wanted.sets[wanted.ranks[area]][0]}: {missing[area]} of "
            f"{wanted.size[area].prod()} elements of {box.hf} {_span(box)} have no source. A source rank is left out, "
            "or the two sides were made from different configs; give every source rank and one config.json to both."
        )
    return Joined(source, target, piece, want, start, size, nbytes_of(wanted, want, size))


def nbytes_of(wanted: Areas, want: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[F] of rectangles of `wanted`, with their scales."""
    block = wanted.block[want]
    scales = np.where(block > 1, (-(-size // block[:, None])).prod(1) * fp8.SCALE_BYTES, 0)
    return np.asarray(size.prod(1) * wanted.itemsize[want] + scales)


def shift(box: Box, start: Sequence[int]) -> tuple[int, ...]:
    """The local offset of the element of the HF tensor at `start`, which may have more dims than the tensor."""
    lead = len(box.offset) - len(box.shape)
    here = zip(box.offset[lead:], start, box.hf_offset, strict=False)
    return box.offset[:lead] + tuple(int(o + e - s) for o, e, s in here)


def distinct(side: Layouts) -> list[TensorLayout]:
    """Each tensor once, whoever has it."""
    return list({id(t): t for rank in sorted(side) for t in side[rank]}.values())


def _read(side: Layouts, numbers: dict[str, int], dims: int, *, by_dtype: bool) -> Side:
    """`numbers`: of HF tensors; grows. by_dtype: what is held in two dtypes is two areas."""
    tensors = distinct(side)
    number = {id(t): i for i, t in enumerate(tensors)}
    tensors_of = {rank: [number[id(t)] for t in side[rank]] for rank in sorted(side)}
    boxes = [box for t in tensors for box in t.boxes]
    first = np.cumsum([0, *(len(t.boxes) for t in tensors)])
    tensor = np.repeat(np.arange(len(tensors)), np.diff(first))
    hf = np.array([numbers.setdefault(b.hf, len(numbers)) for b in boxes], np.int64)
    start = _rows([b.hf_offset for b in boxes], dims, 0)
    size = _rows([b.shape for b in boxes], dims, 1)
    itemsize = np.array([NBYTES[t.dtype] for t in tensors], np.int64)[tensor]
    block = np.array([fp8.BLOCK if t.dtype == fp8.DTYPE else 1 for t in tensors], np.int64)[tensor]
    dtypes = sorted({t.dtype for t in tensors})
    dtype = np.array([dtypes.index(t.dtype) * by_dtype for t in tensors], np.int64)[tensor]
    columns = np.column_stack([hf, start, size, dtype])
    _, box, area = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    area = area.reshape(-1)
    holders: list[list[int]] = [[] for _ in tensors]
    for rank, held in tensors_of.items():
        for t in dict.fromkeys(held):
            holders[t].append(rank)
    ranks, sets = _rank_sets([tuple(h) for h in holders], tensor, area, len(box))
    return Side(
        *(boxes, tensors, tensors_of, first, tensor, area),
        Areas(hf[box], start[box], size[box], itemsize[box], block[box], box, ranks, sets),
    )


def _rows(tuples: list[tuple[int, ...]], dims: int, filler: int) -> np.ndarray:
    """[N, dims], rows filled up at their end."""
    return np.array([t + (filler,) * (dims - len(t)) for t in tuples], np.int64).reshape(-1, dims)


def _rank_sets(
    holders: list[tuple[int, ...]], tensor: np.ndarray, area: np.ndarray, areas: int
) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """The set of ranks that hold each area, [areas] numbers and the sets; `holders`: of each tensor."""
    number: dict[tuple[int, ...], int] = {}
    of_tensor = np.array([number.setdefault(h, len(number)) for h in holders], np.int64)
    order = np.argsort(area, kind="stable")
    sets, ends = of_tensor[tensor[order]], np.searchsorted(area[order], np.arange(areas + 1))
    lowest, highest = (f.reduceat(sets, ends[:-1]) if areas else sets for f in (np.minimum, np.maximum))
    known = list(number)
    for i in np.flatnonzero(lowest != highest):
        union = tuple(sorted({r for s in set(sets[ends[i] : ends[i + 1]].tolist()) for r in known[s]}))
        lowest[i] = number.setdefault(union, len(number))
        known = known if len(known) == len(number) else list(number)
    return lowest, list(number)


def _meet(
    a_group: np.ndarray,
    a_start: np.ndarray,
    a_size: np.ndarray,
    b_group: np.ndarray,
    b_start: np.ndarray,
    b_size: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j), ordered by i, of rectangles of one group that share an element. [n] groups, the rest [n, dims]."""
    order = np.argsort(b_group, kind="stable")
    low = np.searchsorted(b_group[order], a_group, "left")
    count = np.searchsorted(b_group[order], a_group, "right") - low
    i = np.repeat(np.arange(len(a_group)), count)
    j = order[np.arange(len(i)) + np.repeat(low - (np.cumsum(count) - count), count)]
    meets = (a_start[i] < b_start[j] + b_size[j]) & (b_start[j] < a_start[i] + a_size[i])
    hit = meets.all(1)
    return i[hit], j[hit]


def _check_sources(source: Side) -> None:
    areas = source.areas
    i, j = _meet(areas.hf, areas.start, areas.size, areas.hf, areas.start, areas.size)
    for a, b in zip(i[i < j], j[i < j], strict=True):
        one, other = (source.boxes[areas.box[x]] for x in (a, b))
        ranks = [areas.sets[areas.ranks[x]][0] for x in (a, b)]
        raise LayoutError(
            f"{one.hf}: source rank {ranks[0]} holds {_span(one)} and source rank {ranks[1]} holds {_span(other)}: "
            "they overlap without being equal, so elements would have two sources. All source ranks must come from one "
            "topology."
        )


def _check_targets(target: Side) -> None:
    lead = [len(b.offset) - len(b.shape) for b in target.boxes]
    slot = np.array([b.offset[0] + 1 if n else 0 for b, n in zip(target.boxes, lead, strict=True)], np.int64)
    group = target.tensor * (slot.max(initial=0) + 1) + slot
    dims = target.areas.start.shape[1]
    start = _rows([b.offset[n:] for b, n in zip(target.boxes, lead, strict=True)], dims, 0)
    size = target.areas.size[target.area]
    i, j = _meet(group, start, size, group, start, size)
    for a, b in zip(i[i < j], j[i < j], strict=True):
        layout, one, other = target.tensors[target.tensor[a]], target.boxes[a], target.boxes[b]
        (rank, *_) = (rank for rank, held in target.tensors_of.items() if target.tensor[a] in held)
        raise LayoutError(
            f"{layout.name} on destination rank {rank}: {one.hf} at {one.offset} and {other.hf} at {other.offset} "
            "overlap, so elements would be written twice. The model's table is wrong there."
        )


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.hf_offset, box.shape, strict=True)) + "]"
