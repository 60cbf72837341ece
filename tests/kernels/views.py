"""Random views, in memory where every byte that is not theirs is known."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from megatron_rl_kernels.reference import INTEGERS
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]


def bits(tensor: Tensor) -> Tensor:
    """As integers: equal only where every bit is."""
    return tensor.view(INTEGERS[tensor.element_size()])


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bytes: NaNs, infinities, subnormals and all."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


@dataclass(frozen=True)
class Cut:
    """A view into memory that begins at a multiple of 16 bytes and is all NaN, or 0xff, around it."""

    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    """Elements left out along each dim."""
    step: int
    """Along the last dim."""
    order: tuple[int, ...]
    """How the dims lie in memory."""

    def view(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The memory and the view."""
        steps = (*[1] * (len(self.shape) - 1), self.step)
        sizes = [b + n * s + a for n, b, a, s in zip(self.shape, self.before, self.after, steps, strict=True)]
        memory = torch.full([sizes[d] for d in self.order], 0xFF, dtype=torch.uint8).repeat_interleave(
            dtype.itemsize, -1
        )
        whole = memory.view(dtype).permute([self.order.index(d) for d in range(len(sizes))])
        cuts = [slice(b, b + n * s, s) for n, b, s in zip(self.shape, self.before, steps, strict=True)]
        return memory, whole[tuple(cuts)]


def weights(dtype: torch.dtype, *, aligned: bool) -> list[Tensor]:
    """Rows of a [141, 336 or 333] matrix in three pieces: blocks of zeros, with NaN and infinity, and plain.

    Values over nine decades. One block's largest is the number after 448, where the dtype has it.
    """
    columns, around = (336, 8) if aligned else (333, 1)
    pieces = [Cut((n, columns), (2, around), (1, around), 1, (0, 1)).view(dtype)[1] for n in (70, 31, 40)]
    for piece in pieces:
        piece.copy_(torch.randn(piece.shape) * torch.logspace(-6, 3, columns))
        piece[:, :128] = 0
    pieces[1][30, 140:143] = torch.tensor([torch.nan, torch.inf, -3.0])
    pieces[2][27:, 256:].clamp_(-400, 400)[0, 5] = torch.nextafter(torch.tensor(448.0), torch.tensor(torch.inf))
    return pieces


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    some = st.sampled_from([0, 0, 1, 8, 16])
    return Cut(
        shape,
        before=tuple(draw(some) for _ in shape),
        after=tuple(draw(some) for _ in shape),
        step=draw(st.sampled_from([1, 1, 1, 2])),
        order=tuple(draw(st.one_of(st.just(range(len(shape))), st.permutations(range(len(shape)))))),
    )


shapes = st.one_of(
    st.tuples(st.integers(1, 70)),
    st.tuples(st.integers(1, 9), st.sampled_from([1, 3, 8, 16, 33, 64])),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 8, 16, 21])),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 16])),
)
