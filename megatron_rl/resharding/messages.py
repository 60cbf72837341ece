"""What travels from a trainer rank to the engines: messages of bounded size, each described on both sides alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from megatron_rl.errors import SyncError
from megatron_rl.layouts.boxes import NBYTES
from megatron_rl.layouts.fp8 import BLOCK, SCALE, SCALE_BYTES, scale_offset, scale_shape

ALIGN_BYTES = 16
"""Of each rectangle in a message: the largest element and the width of vector loads."""
BLOCK_BYTES = BLOCK**2 + ALIGN_BYTES
"""Of an FP8 block with its scale."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle of a message, contiguous there, and where it lies in a tensor of the rank that asked."""

    tensor: str
    """Of the sender when it comes from `sends`, of the reader when it comes from `receives`."""
    offset: tuple[int, ...]
    """With one more number than `shape`, the first is the index of an expert's slot."""
    shape: tuple[int, ...]
    dtype: str
    """The reader's tensor's: the sender casts while it packs."""
    at: int
    """First byte in the message, a multiple of ALIGN_BYTES. A reader that holds a rectangle twice has two pieces."""

    @property
    def nbytes(self) -> int:
        """Of the rectangle, alignment left out."""
        return prod(self.shape) * NBYTES[self.dtype]


def scales_of(piece: Piece) -> Piece:
    """The scales of a rectangle in FP8, which follow it in the message.

    They fit in: a multiple of ALIGN_BYTES that holds the bytes of both holds what is between them too.
    """
    at = -(-(piece.at + piece.nbytes) // SCALE_BYTES) * SCALE_BYTES
    offset, shape = scale_offset(piece.offset, piece.shape), scale_shape(piece.shape)
    return Piece(piece.tensor + SCALE, offset, shape, "float32", at)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a message's bytes, in whole rectangles, that has a checksum of its own."""

    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def content(self) -> str:
        """As errors name it."""
        first, last = self.pieces[0].tensor, self.pieces[-1].tensor
        return first if first == last else f"{first} ... {last}"


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that one trainer rank packs once and that every one of `readers` unpacks."""

    number: int
    """Unique, below 2**63, with gaps. Every rank handles its messages in ascending order."""
    src: int
    """Trainer rank."""
    readers: tuple[int, ...]
    """Engine ranks (engine * its world size + rank), ascending, all of one node."""
    kind: str
    """"local": sender and readers share a device. "node": they share a node, and every reader reads the sender's
    memory. "network": `fetcher` receives it and hands it to the other readers inside their node."""
    fetcher: int
    """The reader that receives it from another node; for the other kinds the first of `readers`."""
    nbytes: int
    """With alignment; at most the spec's `bucket_bytes`."""
    payload_bytes: int
    """Without alignment: what a reader counts as received."""
    digest: str
    """Of everything above and of the pieces' HF rectangles, dtypes and positions: equal on both sides, or the two sides
    computed different plans."""
    pieces: tuple[Piece, ...]

    def parts(self, least_bytes: int) -> list[Part]:
        """All of it in parts of at least so many bytes, but for the last: the same ones on both sides."""
        firsts = [0]
        for i, piece in enumerate(self.pieces):
            # Scales stay with their rectangle: only a reader has them as pieces.
            if piece.at - self.pieces[firsts[-1]].at >= least_bytes and not piece.tensor.endswith(SCALE):
                firsts.append(i)
        runs = [self.pieces[a:b] for a, b in pairwise([*firsts, len(self.pieces)])]
        ends = [*(run[0].at for run in runs[1:]), self.nbytes]
        return [Part(run[0].at, end, run) for run, end in zip(runs, ends, strict=True)]

    @property
    def content(self) -> str:
        """As errors name it."""
        return Part(0, self.nbytes, self.pieces).content

    @property
    def takers(self) -> tuple[int, ...]:
        """The readers that the sender itself deals with."""
        return (self.fetcher,) if self.kind == "network" else self.readers


@contextmanager
def handling(message: Message, who: str) -> Iterator[None]:
    """What goes wrong in the block, such as missing memory, is a SyncError that names `who` and the tensors."""
    try:
        yield
    except SyncError:
        raise
    except (MemoryError, OSError, RuntimeError) as error:
        what = f"{who}: {message.content}: {type(error).__name__}: {error}"
        raise SyncError(f"{what}. With that mended, push again.") from error
