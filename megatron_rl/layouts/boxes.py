"""Boxes: which rectangle of which Hugging Face tensor lies where in a rank's own tensor. Integers only, no weights.

The Hugging Face checkpoint, as it lies on disk (one tensor per expert, nothing fused), is the common ground: two sides
that never heard of each other are joined by what their boxes share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of an element, by dtype: those that models are trained in."""
NBYTES = {**DTYPE_BYTES, "float8_e4m3fn": 1}
"""Those that weights are kept in."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of one HF tensor, and where it lies in a rank-local tensor."""

    hf: str
    """Name in the HF checkpoint."""
    hf_offset: tuple[int, ...]
    """Its first element in the HF tensor."""
    offset: tuple[int, ...]
    """Its first element in the local tensor; may have one more, leading, dim: the expert's slot."""
    shape: tuple[int, ...]
    """Extents in the HF tensor's dims; along a leading slot dim the extent is 1."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One rank-local tensor and the boxes that fill it; what they leave uncovered is padding."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of a torch dtype, such as "bfloat16"."""
    boxes: tuple[Box, ...]
    """Disjoint."""

    @property
    def nbytes(self) -> int:
        """With padding."""
        return prod(self.shape) * NBYTES[self.dtype]


def find_overlap(rectangles: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, int] | None:
    """Indices of two (offset, shape) rectangles that share an element, or None; all have the same rank."""
    open_: list[int] = []
    for i in sorted(range(len(rectangles)), key=lambda i: rectangles[i][0]):
        offset, shape = rectangles[i]
        # Sorted by their first row: one that ended before this row meets none of the rest.
        open_ = [j for j in open_ if rectangles[j][0][0] + rectangles[j][1][0] > offset[0]]
        for j in open_:
            other, extent = rectangles[j]
            if all(a < b + n and b < a + m for a, m, b, n in zip(offset, shape, other, extent, strict=True)):
                return min(i, j), max(i, j)
        open_.append(i)
    return None
