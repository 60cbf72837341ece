"""Where an engine rank puts what arrives: into its parameters, or into HF tensors for SGLang's own loader."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from megatron_rl_kernels import copy_boxes, prepare
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.resharding.messages import Message
from megatron_rl.resharding.spec import trainer_name
from megatron_rl.resharding.views import message_views, tensor_views

NamedTensors = Iterable[tuple[str, Tensor]]


class Parameters:
    """The engine's own, written in place."""

    peak_bytes = 0
    """Memory beside the parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], me: str):
        self._parameters, self._me = parameters, me
        self._unpacking: dict[tuple[int, int], tuple[list[Tensor], list[Tensor], Callable[[], None]]] = {}
        """By memory and message: where its rectangles go to, where they lie in it, and the copy."""

    def write(self, message: Message, memory: Tensor, *, compare: bool) -> int:
        """Write a message that lies in `memory`, or compare the parameters with it. Returns: the rectangles' bytes.

        Raises: SyncError naming tensor, ranks and the first element that differs.
        """
        key = memory.data_ptr(), message.number
        if key not in self._unpacking:
            held, sent = tensor_views(self._parameters, message.pieces), message_views(memory, message.pieces)
            self._unpacking[key] = held, sent, prepare(copy_boxes, held, sent)
        held, sent, unpack = self._unpacking[key]
        if compare:
            self._compare(message, held, sent)
        else:
            unpack()
        return sum(view.nbytes for view in sent)

    def finished(self) -> NamedTensors:
        """Nothing: all is where it belongs."""
        return ()

    def _compare(self, message: Message, held: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        for piece, ours, want in zip(message.pieces, held, sent, strict=True):
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

    def write(self, message: Message, memory: Tensor, *, compare: bool) -> int:
        """Write a message that lies in `memory`. Returns: the rectangles' bytes."""
        assert not compare, "a loader takes tensors, and shows none"
        for piece in message.pieces:
            if piece.tensor not in self._open:
                self._begin(self._layouts[piece.tensor])
            self._missing[piece.tensor] -= piece.nbytes
        sent = message_views(memory, message.pieces)
        copy_boxes(tensor_views(self._open, message.pieces), sent)
        return sum(view.nbytes for view in sent)

    def _begin(self, layout: TensorLayout) -> None:
        tensor = torch.empty(layout.shape, dtype=getattr(torch, layout.dtype), device=self._device)
        weakref.finalize(tensor, self._free, tensor.nbytes).atexit = False
        self._open[layout.name] = tensor
        self._held_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def _free(self, nbytes: int) -> None:
        self._held_bytes -= nbytes

    def finished(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are whole, and that all before them went before; each once, and no longer held here."""
        while self._order and not self._missing[self._order[0].name]:
            name = self._order.popleft().name
            yield name, self._open.pop(name)
