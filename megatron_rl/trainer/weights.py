"""Weights between a rank and Hugging Face checkpoints, by the layout table. No rank ever holds a whole model."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from safetensors import safe_open
from torch import Tensor

from megatron_rl.errors import BackendError, DataError
from megatron_rl.formats.hf_files import files_of, read_checkpoint
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.resharding.execute import check_tensors, copy_view
from megatron_rl.resharding.plan import Copy


def named_tensors(chunks: Sequence[DistributedDataParallel], layouts: Sequence[TensorLayout]) -> dict[str, Tensor]:
    """This rank's tensors under their layout names. Raises: LayoutError when they are not what the table declares."""
    tensors: dict[str, Tensor] = {}
    for i, chunk in enumerate(chunks):
        tensors |= {f"{i}:{name}": p.detach() for name, p in chunk.module.named_parameters()}
        tensors |= {f"{i}:{name}": b for name, b in chunk.module.named_buffers() if name.endswith("router.expert_bias")}
    check_tensors(tensors, layouts, whose="The trainer's model")
    return tensors


@torch.no_grad()
def import_hf(directory: Path, tensors: Mapping[str, Tensor], layouts: Iterable[TensorLayout]) -> None:
    """Fill this rank's tensors from a checkpoint, reading only what they need; padding becomes 0.

    Raises: DataError when a tensor is missing, too small, or would lose precision that the table pins.
    """
    files = files_of(directory)
    opened: dict[Path, Any] = {}
    for layout in layouts:
        tensor = tensors[layout.name]
        if sum(prod(box.shape) for box in layout.boxes) < tensor.numel():
            tensor.zero_()
        for box in layout.boxes:
            if box.hf not in files:
                raise DataError(
                    f"{directory} has no tensor {box.hf}, which config.json promises. Is it another model's?"
                )
            path = files[box.hf]
            if path not in opened:
                opened[path] = safe_open(path, "pt").__enter__()  # noqa: SIM115 # closed with the process's last use
            source = opened[path].get_slice(box.hf)
            ends = [a + n for a, n in zip(box.hf_offset, box.shape, strict=True)]
            if any(end > size for end, size in zip(ends, source.get_shape(), strict=True)):
                raise DataError(
                    f"{box.hf} in {path} has shape {source.get_shape()}, and this rank needs it up to {ends}: "
                    "config.json and weights disagree. Use the config.json that belongs to the weights."
                )
            part = source[tuple(slice(a, end) for a, end in zip(box.hf_offset, ends, strict=True))]
            copy_view(tensor, box.offset, box.shape).copy_(part)


@contextlib.contextmanager
def swapped(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute with other weights, then put the own ones back."""
    own = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(others[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(own[name])


def write_rectangles(directory: Path, tensors: Mapping[str, Tensor], copies: Iterable[Copy]) -> None:
    """Write this rank's rectangles of a plan to HF layouts into the files that `write_headers` made."""
    opened: dict[str, int] = {}
    try:
        places = read_checkpoint(directory)
        for copy in copies:
            place = places[copy.dst]
            if place.file not in opened:
                opened[place.file] = os.open(directory / place.file, os.O_RDWR)
            _write(opened[place.file], place.at, place.shape, copy, tensors[copy.src])
    except OSError as error:
        raise BackendError(f"Writing the checkpoint below {directory} failed: {error}. Free space there.") from error
    finally:
        for fd in opened.values():
            os.close(fd)


def _write(fd: int, base: int, shape: Sequence[int], copy: Copy, source: Tensor) -> None:
    """Rows of the rectangle, one write each; a rectangle as wide as the tensor in one."""
    part = copy_view(source, copy.src_offset, copy.shape).contiguous().cpu()
    item = part.element_size()
    data = part.view(torch.uint8) if part.dim() else part
    width = prod(shape[1:])
    whole_rows = tuple(copy.shape[1:]) == tuple(shape[1:])
    if whole_rows:
        _pwrite(fd, data.numpy().tobytes(), base + copy.dst_offset[0] * width * item)
        return
    assert len(shape) == 2, (copy, shape)
    for i, row in enumerate(data.numpy()):
        _pwrite(fd, row.tobytes(), base + ((copy.dst_offset[0] + i) * width + copy.dst_offset[1]) * item)


def _pwrite(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
