"""A plan's rectangles as views of tensors, and the check that the tensors are the declared ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import xxhash
from megatron_rl_kernels import checksum_boxes, copy_boxes, prepare, quantize_boxes
from torch import Tensor

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.fp8 import DTYPE
from megatron_rl.resharding.messages import Message, Part, Piece, scales_of
from megatron_rl.resharding.timer import Timer

DIFFERENCES_SHOWN = 8
PART_BYTES = 2 << 20
"""Of a message, that a CPU deals with at once: still in its nearest caches when the checksum is taken."""


def copy_view(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """View of the rectangle at `offset`; with one more offset than `shape` has dims, the first is a slot to drop."""
    if len(offset) == len(shape) + 1:
        tensor, offset = tensor[offset[0]], offset[1:]
    assert tensor.dim() == len(shape), (tuple(tensor.shape), tuple(offset), tuple(shape))
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def message_views(memory: Tensor, pieces: Iterable[Piece]) -> list[Tensor]:
    """The rectangles of a message that lies in `memory`, uint8."""
    return [memory[p.at : p.at + p.nbytes].view(getattr(torch, p.dtype)).view(p.shape) for p in pieces]


def tensor_views(tensors: Mapping[str, Tensor], pieces: Iterable[Piece]) -> list[Tensor]:
    """The same rectangles where they lie in a rank's tensors."""
    return [copy_view(tensors[p.tensor], p.offset, p.shape) for p in pieces]


def parts_of(message: Message, device: torch.device) -> list[Part]:
    """What of a message is packed, or checked and written, at once: a GPU takes all of it."""
    return message.parts(message.nbytes if device.type == "cuda" else PART_BYTES)


def packing(memory: Tensor, message: Message, tensors: Mapping[str, Tensor]) -> list[tuple[Callable[[], None], Tensor]]:
    """What fills each part of a message that lies in `memory` from a rank's tensors, and the part.

    They copy, cast, and make FP8 with its scales.
    """
    parts = parts_of(message, memory.device)
    return [(_filling(memory, part.pieces, tensors), memory[part.start : part.end]) for part in parts]


def _filling(memory: Tensor, pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    copied = [p for p in pieces if p.dtype != DTYPE]
    quantized = [p for p in pieces if p.dtype == DTYPE]
    copy = prepare(copy_boxes, message_views(memory, copied), tensor_views(tensors, copied))
    if not quantized:
        return copy
    slots = message_views(memory, quantized), message_views(memory, map(scales_of, quantized))
    quantize = prepare(quantize_boxes, *slots, [[view] for view in tensor_views(tensors, quantized)])

    def fill() -> None:
        copy()
        quantize()

    return fill


def checksum_of(memory: Tensor) -> str:
    """32 hex digits for the bytes of a buffer, uint8 [n]: XXH3-128, on a GPU of its chunks, on a CPU of the whole.

    Chunks let a GPU work on all at once; a CPU would take twice as long over them. Both ends of a link have one kind of
    device.
    """
    if memory.is_cuda:
        return checksum_boxes([memory])[0]
    return xxhash.xxh3_128_hexdigest(memory.numpy())


def pack(steps: Iterable[tuple[Callable[[], None], Tensor]], timer: Timer) -> list[str]:
    """Take the steps that `packing` made. Returns: the checksum of each part."""
    checksums = []
    for fill, part in steps:
        with timer("pack"):
            fill()
        with timer("check"):
            checksums.append(checksum_of(part))
    return checksums


def check_tensors(tensors: Mapping[str, Tensor], layouts: Sequence[TensorLayout], *, whose: str) -> None:
    """Raises: LayoutError listing how names, shapes or dtypes of `tensors` differ from those of `layouts`."""
    declared = {t.name: t for t in layouts}
    wrong = [f"{name} is not in the layout table" for name in tensors if name not in declared]
    for name, layout in declared.items():
        if name not in tensors:
            wrong.append(f"{name} is missing")
            continue
        found = (tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch."))
        if found != (tuple(layout.shape), layout.dtype):
            wrong.append(f"{name} is {found[0]} {found[1]}, declared {tuple(layout.shape)} {layout.dtype}")
    if wrong:
        more = f" and {len(wrong) - DIFFERENCES_SHOWN} more" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise LayoutError(
            f"{whose}: {len(wrong)} of {len(declared)} tensors differ from the layout table: "
            f"{'; '.join(wrong[:DIFFERENCES_SHOWN])}{more}. Writing them would corrupt the model; mend the model "
            "family's table or the topology."
        )
