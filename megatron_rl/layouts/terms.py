"""Terms: how a rank's tensor is made of HF tensors. A table is written in terms; a rank's place turns them into boxes.

A term says what a tensor is on any rank of any topology. `local` works out what it is on one rank: rectangles of HF
tensors, stacked along dim 0. No rank or topology is known here beyond the numbers in `Place`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron_rl.errors import LayoutError


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of the HF checkpoint."""

    name: str
    """Without its block's prefix; "{expert}" stands for the expert's number."""
    shape: tuple[int, ...]
    dtype: str | None = None
    """Set when every side keeps this dtype whatever dtype the model runs in."""


@dataclass(frozen=True, slots=True)
class Rep:
    """The whole tensor, on every rank."""

    tensor: HfTensor


@dataclass(frozen=True, slots=True)
class Rows:
    """An equal share of the rows, in blocks of `unit` rows that stay together (a head)."""

    tensor: HfTensor
    axis: str
    unit: int = 1
    repeat: bool = False
    """With more ranks than blocks, neighbouring ranks hold the same block (key-value heads)."""


@dataclass(frozen=True, slots=True)
class Cols:
    """An equal share of the columns, in blocks of `unit`."""

    tensor: HfTensor
    axis: str
    unit: int = 1


@dataclass(frozen=True, slots=True)
class PadVocab:
    """An equal share of the rows of a vocabulary that is padded at its end."""

    tensor: HfTensor
    axis: str


@dataclass(frozen=True, slots=True)
class PerGroup:
    """Tensors interleaved group by group, then cut into equal runs of rows: Megatron's [q q k v | q q k v | ...].

    With more ranks than groups a group is cut wherever that falls: some ranks hold no row of k or v.
    """

    tensors: tuple[HfTensor, ...]
    groups: int
    axis: str


@dataclass(frozen=True, slots=True)
class Concat:
    """Each part's own share, one below the other: [gate; up]."""

    parts: tuple[Rep | Rows | PerGroup, ...]


@dataclass(frozen=True, slots=True)
class Expert:
    """An equal share of the experts. A name with "{slot}" is one tensor per expert; else they share a leading dim."""

    inner: Rows | Cols | Concat
    experts: int
    axis: str = "ep"


Piece = Rep | Rows | Cols | PadVocab | PerGroup | Concat
Term = Piece | Expert


@dataclass(frozen=True, slots=True)
class Axis:
    """A rank's place along one axis of a topology."""

    rank: int
    size: int
    key: str
    """The config key that sets the size, for messages."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the terms need to know of a rank."""

    axes: Mapping[str, Axis]
    padded_vocab: Callable[[int, int], int]
    """(rows of a vocabulary, ranks that cut it) -> rows over all of them, padding included."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of an HF tensor."""

    tensor: HfTensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's tensor: rectangles stacked along dim 0 from row 0 on; the rows below them are padding."""

    shape: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]


def local(term: Piece, place: Place) -> Local:
    """What `term` is on the rank at `place`. Raises: LayoutError when it cannot be cut that way."""
    match term:
        case Rep(t):
            return _stack((Rectangle(t, (0,) * len(t.shape), t.shape),))
        case Rows(t, axis, unit, repeat):
            a, b = share(t.shape[0] // unit, place.axes[axis], f"{t.name} (blocks of {unit} rows)", repeat=repeat)
            return _stack((_rows(t, a * unit, b * unit),))
        case Cols(t, axis, unit):
            a, b = share(t.shape[1] // unit, place.axes[axis], f"{t.name} (blocks of {unit} columns)")
            return _stack((Rectangle(t, (0, a * unit), (t.shape[0], (b - a) * unit)),))
        case PadVocab(t, axis):
            rows = place.padded_vocab(t.shape[0], place.axes[axis].size)
            a, b = share(rows, place.axes[axis], f"{t.name} (padded rows)")
            end = min(b, t.shape[0])
            return Local((b - a, *t.shape[1:]), (_rows(t, a, end),) if a < end else ())
        case PerGroup(tensors, groups, axis):
            share(groups, place.axes[axis], f"{tensors[-1].name} (key-value heads)", repeat=True)
            rows = sum(t.shape[0] for t in tensors)
            return _interleaved(tensors, groups, share(rows, place.axes[axis], "the rows of queries, keys and values"))
        case Concat(pieces):
            return _stack(tuple(r for piece in pieces for r in local(piece, place).rectangles))


def share(blocks: int, axis: Axis, what: str, *, repeat: bool = False) -> tuple[int, int]:
    """Half-open range of the `blocks` that the rank holds. Raises: LayoutError when they do not divide."""
    if blocks % axis.size == 0:
        each = blocks // axis.size
        return axis.rank * each, (axis.rank + 1) * each
    if repeat and axis.size % blocks == 0:
        first = axis.rank // (axis.size // blocks)
        return first, first + 1
    legal = ", ".join(str(n) for n in range(1, blocks + 1) if blocks % n == 0)
    raise LayoutError(
        f"{axis.key}={axis.size} does not divide {what}, of which there are {blocks}: every rank needs as many. "
        f"Set {axis.key} to one of {legal}" + (f" or a multiple of {blocks}." if repeat else ".")
    )


def tensors_of(term: Term) -> Iterator[HfTensor]:
    """The HF tensors that a term is made of, in order."""
    match term:
        case Expert(inner):
            yield from tensors_of(inner)
        case Concat(parts):
            for part in parts:
                yield from tensors_of(part)
        case PerGroup(tensors):
            yield from tensors
        case Rep(t) | Rows(t) | Cols(t) | PadVocab(t):
            yield t


def axes_of(term: Term) -> Iterator[str]:
    """The axes that cut a term."""
    match term:
        case Expert(inner, axis=axis):
            yield axis
            yield from axes_of(inner)
        case Concat(parts):
            for part in parts:
                yield from axes_of(part)
        case Rows(axis=axis) | Cols(axis=axis) | PadVocab(axis=axis) | PerGroup(axis=axis):
            yield axis


def _rows(tensor: HfTensor, start: int, end: int) -> Rectangle:
    rest = tensor.shape[1:]
    return Rectangle(tensor, (start, *(0 for _ in rest)), (end - start, *rest))


def _interleaved(tensors: tuple[HfTensor, ...], groups: int, held: tuple[int, int]) -> Local:
    """The rows `held` (half-open) of what `tensors` are when interleaved group by group."""
    rectangles, at = [], 0
    for group in range(groups):
        for t in tensors:
            each = t.shape[0] // groups
            low, high = max(held[0] - at, 0), min(held[1] - at, each)
            if low < high:
                rectangles.append(_rows(t, group * each + low, group * each + high))
            at += each
    return _stack(tuple(rectangles))


def _stack(rectangles: tuple[Rectangle, ...]) -> Local:
    return Local((sum(r.shape[0] for r in rectangles), *rectangles[0].shape[1:]), rectangles)
