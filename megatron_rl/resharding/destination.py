"""Where an engine rank puts what arrives: into its parameters, or into HF tensors for SGLang's own loader."""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from megatron_rl_kernels import copy_boxes, prepare, quantize_boxes
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.fp8 import DTYPE, SCALE, scale_shape
from megatron_rl.resharding.messages import Message, Part, Piece, scales_of
from megatron_rl.resharding.spec import trainer_name
from megatron_rl.resharding.views import copy_view, message_views, tensor_views

NamedTensors = Iterable[tuple[str, Tensor]]


def quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3, and the scales of its blocks."""
    made = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device=tensor.device)
    scale = torch.empty(scale_shape(tensor.shape), device=tensor.device)
    quantize_boxes([made], [scale], [[tensor]])
    return made, scale


class Matrices:
    """Of FP8 parameters, what comes in full because no sender has all of some block, until it is whole."""

    def __init__(self, parameters: Mapping[str, Tensor], messages: Iterable[Message]):
        """`messages`: of such parts, and nothing else."""
        self._parameters = parameters
        self._nbytes = Counter[tuple[str, tuple[int, ...]]]()
        """That come for each matrix: a tensor's name, and an expert's slot."""
        self.numbers = {message.number for message in messages}
        for piece in (piece for message in messages for piece in message.pieces):
            self._nbytes[piece.tensor, piece.offset[:-2]] += piece.nbytes
        self._open: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._missing: dict[tuple[str, tuple[int, ...]], int] = {}
        self.peak_bytes = 0
        """The most that they took at one time."""

    def add(self, part: Part, memory: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Take what a part of a message in `memory` holds. Yields: matrices that are whole, and where they belong."""
        for piece, sent in zip(part.pieces, message_views(memory, part.pieces), strict=True):
            key = piece.tensor, piece.offset[:-2]
            if key not in self._open:
                shape = self._parameters[piece.tensor].shape[-2:]
                self._open[key] = torch.empty(shape, dtype=sent.dtype, device=sent.device)
                self._missing[key] = self._nbytes[key]
                self.peak_bytes = max(self.peak_bytes, sum(t.nbytes for t in self._open.values()))
            copy_view(self._open[key], piece.offset[-2:], piece.shape).copy_(sent)
            self._missing[key] -= piece.nbytes
            if not self._missing[key]:
                tensor = self._open.pop(key)
                yield Piece(piece.tensor, (*piece.offset[:-2], 0, 0), tuple(tensor.shape), DTYPE, 0), tensor


class Parameters:
    """The engine's own, written in place."""

    def __init__(self, parameters: Mapping[str, Tensor], me: str, in_full: Sequence[Message] = ()):
        """in_full: messages with parts of `Matrices`."""
        self._parameters, self._me = parameters, me
        self._matrices = Matrices(parameters, in_full)
        self._unpacking: dict[tuple[int, int, int], tuple[list[Tensor], list[Tensor], Callable[[], None]]] = {}
        """By memory, message and part: where its rectangles go to, where they lie in it, and the copy."""

    def write(self, message: Message, part: Part, memory: Tensor, *, compare: bool) -> None:
        """Write a part of a message that lies in `memory`, or compare the parameters with it.

        Raises: SyncError naming tensor, ranks and the first element that differs.
        """
        if message.number in self._matrices.numbers:
            for piece, matrix in self._matrices.add(part, memory):
                both = piece, scales_of(piece)
                held = tensor_views(self._parameters, both)
                if compare:
                    self._compare(message, both, held, quantized(matrix))
                else:
                    quantize_boxes([held[0]], [held[1]], [[matrix]])
            return
        key = memory.data_ptr(), message.number, part.start
        if key not in self._unpacking:
            held, sent = tensor_views(self._parameters, part.pieces), message_views(memory, part.pieces)
            self._unpacking[key] = held, sent, prepare(copy_boxes, held, sent)
        held, sent, unpack = self._unpacking[key]
        if compare:
            self._compare(message, part.pieces, held, sent)
        else:
            unpack()

    @property
    def peak_bytes(self) -> int:
        """Memory beside the parameters."""
        return self._matrices.peak_bytes

    def finished(self) -> NamedTensors:
        """Nothing: all is where it belongs."""
        return ()

    def _compare(
        self, message: Message, pieces: Sequence[Piece], held: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        for piece, ours, want in zip(pieces, held, sent, strict=True):
            # As bytes: NaN equals itself there, and 0.0 is not -0.0.
            differs = ours.contiguous().view(torch.uint8) != want.view(torch.uint8)
            if differs.any():
                first = int(differs.flatten().nonzero()[0]) // want.element_size()
                at = [int(i) for i in torch.unravel_index(torch.tensor(first), want.shape)]
                lead = len(piece.offset) - len(at)
                where = [*piece.offset[:lead], *(a + i for a, i in zip(piece.offset[lead:], at, strict=True))]
                raise SyncError(
                    f"{self._me}: {piece.tensor}{where} is {ours[tuple(at)].item()} after the load, and "
                    f"{trainer_name(message.src)} sent {want[tuple(at)].item()}: something wrote over it. Switch off "
                    "what changes weights in the engine (rollout.sglang), or test the machine's memory."
                )


class Assembly:
    """HF tensors of one push, put together from messages that come in order.

    Memory is taken with a tensor's first rectangle and never used again: the loader may keep what it gets.
    """

    def __init__(self, layouts: Sequence[TensorLayout], device: torch.device):
        """`layouts`: of all tensors, in the order in which `finished` gives them."""
        self._device = device
        self._order = deque(layouts)
        self._layouts = {layout.name: layout for layout in layouts}
        self._missing = {layout.name: layout.nbytes for layout in layouts}
        """Bytes of each that have not come."""
        self._open: dict[str, Tensor] = {}
        self._held_bytes = 0
        self.peak_bytes = 0
        """The most that tensors took at one time, with those that the loader had and still kept."""

    def write(self, message: Message, part: Part, memory: Tensor, *, compare: bool) -> None:
        """Write a part of a message that lies in `memory`."""
        assert not compare, "a loader takes tensors, and shows none"
        for piece in part.pieces:
            if piece.tensor not in self._open:
                self._begin(self._layouts[piece.tensor], piece.dtype)
            self._missing[piece.tensor] -= piece.nbytes
        copy_boxes(tensor_views(self._open, part.pieces), message_views(memory, part.pieces))

    def _begin(self, layout: TensorLayout, dtype: str) -> None:
        """In a dtype that is not the layout's come FP8 tensors of which no sender has all of some block."""
        self._open[layout.name] = tensor = torch.empty(layout.shape, dtype=getattr(torch, dtype), device=self._device)
        self._missing[layout.name] = tensor.nbytes
        self._hold(tensor)

    def _hold(self, tensor: Tensor) -> None:
        weakref.finalize(tensor, self._free, tensor.nbytes).atexit = False
        self._held_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def _free(self, nbytes: int) -> None:
        self._held_bytes -= nbytes

    def finished(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are whole, and that all before them went before; each once, and no longer held here."""
        while self._order and not self._missing[self._order[0].name]:
            layout = self._order.popleft()
            name, tensor = layout.name, self._open.pop(layout.name)
            if layout.dtype == DTYPE and tensor.dtype != torch.float8_e4m3fn:
                tensor, scale = quantized(tensor)
                self._hold(tensor)
                self._hold(scale)
                self._open[name + SCALE], self._missing[name + SCALE] = scale, 0
            yield name, tensor
