"""The plan: which rank copies which rectangle where, so that every wanted element has exactly one source.

Pure integers: the same plan runs over shared memory, CUDA IPC or a network, and any rank can make it again.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import DTYPE_BYTES, Box, TensorLayout, find_overlap


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle. An offset with one more number than `shape` begins with the index of an expert's slot."""

    src_rank: int
    dst_rank: int
    src: str
    src_offset: tuple[int, ...]
    dst: str
    dst_offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Holder:
    rank: int
    tensor: str
    offset: tuple[int, ...]
    bytes_per_element: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rectangle of an HF tensor, and every place that holds it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    holders: tuple[_Holder, ...]


def make_plan(
    sources: Mapping[int, Sequence[TensorLayout]], destinations: Mapping[int, Sequence[TensorLayout]]
) -> tuple[Copy, ...]:
    """Copies that fill every box of every destination rank, in the order of ranks and their tensors.

    Among ranks that hold the same rectangle, the one with the fewest bytes to send so far sends it, the lowest of
    equals: the same arguments give the same plan everywhere.
    Raises: LayoutError when an element has no source, two unlike sources, or two boxes of one destination tensor.
    """
    pieces = _pieces(sources)
    sent_bytes = dict.fromkeys(sources, 0)
    plan: list[Copy] = []
    for rank in sorted(destinations):
        for layout in destinations[rank]:
            if clash := find_overlap(
                [(b.offset, (1,) * (len(b.offset) - len(b.shape)) + b.shape) for b in layout.boxes]
            ):
                a, b = (layout.boxes[i] for i in clash)
                raise LayoutError(
                    f"{layout.name} on destination rank {rank}: {a.hf} at {a.offset} and {b.hf} at {b.offset} overlap, "
                    "so elements would be written twice. The model's table is wrong there."
                )
            for box in layout.boxes:
                plan += _fill(rank, layout.name, box, pieces.get(box.hf, ()), sent_bytes)
    return tuple(plan)


def plan_hash(plan: Sequence[Copy]) -> str:
    """Names the plan; equal on two sides only if every copy is."""
    digest = hashlib.blake2b(digest_size=16)
    for copy in plan:
        digest.update(repr(copy).encode())
    return digest.hexdigest()


def _pieces(sources: Mapping[int, Sequence[TensorLayout]]) -> dict[str, list[_Piece]]:
    """By HF tensor, the distinct rectangles that the sources hold; no two share an element."""
    holders: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Holder]]] = {}
    for rank in sorted(sources):
        for layout in sources[rank]:
            size = DTYPE_BYTES[layout.dtype]
            for box in layout.boxes:
                same = holders.setdefault(box.hf, {}).setdefault((box.hf_offset, box.shape), [])
                same.append(_Holder(rank, layout.name, box.offset, size))
    pieces = {}
    for hf, held in holders.items():
        pieces[hf] = [_Piece(offset, shape, tuple(who)) for (offset, shape), who in held.items()]
        if clash := find_overlap(list(held)):
            a, b = (pieces[hf][i] for i in clash)
            raise LayoutError(
                f"{hf}: source rank {a.holders[0].rank} holds {_span(a.offset, a.shape)} and source rank "
                f"{b.holders[0].rank} holds {_span(b.offset, b.shape)}: they overlap without being equal, so elements "
                "would have two sources. All source ranks must come from one topology."
            )
    return pieces


def _fill(rank: int, tensor: str, box: Box, pieces: Sequence[_Piece], sent_bytes: dict[int, int]) -> Iterator[Copy]:
    """Copies that fill one destination box. Pieces are disjoint, so counting elements proves exact cover."""
    missing = math.prod(box.shape)
    for piece in pieces:
        low = tuple(map(max, box.hf_offset, piece.offset))
        high = map(min, _end(box.hf_offset, box.shape), _end(piece.offset, piece.shape))
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        if min(shape) <= 0:
            continue
        holder = min(piece.holders, key=lambda h: (sent_bytes[h.rank], h.rank))
        sent_bytes[holder.rank] += math.prod(shape) * holder.bytes_per_element
        missing -= math.prod(shape)
        src_offset = _shift(holder.offset, low, piece.offset)
        yield Copy(holder.rank, rank, holder.tensor, src_offset, tensor, _shift(box.offset, low, box.hf_offset), shape)
    if missing:
        raise LayoutError(
            f"{tensor} on destination rank {rank}: {missing} of {math.prod(box.shape)} elements of {box.hf} "
            f"{_span(box.hf_offset, box.shape)} have no source. A source rank is left out, or the two sides were made "
            "from different configs; give every source rank and one config.json to both."
        )


def _shift(offset: tuple[int, ...], low: tuple[int, ...], start: tuple[int, ...]) -> tuple[int, ...]:
    """The local offset of element `low` of the HF tensor in a box that starts at `start` there and `offset` here."""
    lead = len(offset) - len(low)
    return offset[:lead] + tuple(here + e - s for here, e, s in zip(offset[lead:], low, start, strict=True))


def _end(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(o + n for o, n in zip(offset, shape, strict=True))


def _span(offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True)) + "]"
