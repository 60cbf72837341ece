"""Weights between a rank and Hugging Face checkpoints, by the layout table. No rank ever holds a whole model."""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from safetensors import safe_open
from torch import Tensor

from megatron_rl.errors import BackendError, DataError
from megatron_rl.formats import hf_files, manifest
from megatron_rl.layouts.boxes import Box, TensorLayout
from megatron_rl.layouts.compile import hf_layouts, megatron_ranks
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.table import Table
from megatron_rl.resharding.plan import Copy, make_plan
from megatron_rl.resharding.views import check_tensors, copy_view


def named_tensors(chunks: Sequence[DistributedDataParallel], layouts: Sequence[TensorLayout]) -> dict[str, Tensor]:
    """This rank's tensors under their layout names. Raises: LayoutError when they are not what the table declares."""
    tensors: dict[str, Tensor] = {}
    for i, chunk in enumerate(chunks):
        tensors |= {f"{i}:{name}": p.detach() for name, p in chunk.module.named_parameters()}
        tensors |= {f"{i}:{name}": b for name, b in chunk.module.named_buffers() if name.endswith("router.expert_bias")}
    check_tensors(tensors, layouts, whose="The trainer's model")
    return tensors


@torch.no_grad()
def import_hf(
    directory: Path,
    tensors: Mapping[str, Tensor],
    layouts: Iterable[TensorLayout],
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
    pinned: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Fill this rank's tensors from a checkpoint, reading only what they need; padding becomes 0.

    aliases: HF tensors that have to equal others, where the checkpoint holds them. pinned: dtypes that HF tensors keep
    whatever dtype the model runs in.
    Raises: DataError when a tensor is missing, too small, differs from its alias, or was cast.
    """
    files = hf_files.files_of(directory)
    copies: dict[str, list[str]] = {}
    for alias, own in aliases.items():
        if alias in files:
            copies.setdefault(own, []).append(alias)
    with ExitStack() as stack:

        @functools.cache
        def opened(path: Path) -> Any:
            return stack.enter_context(safe_open(path, "pt"))

        for layout in layouts:
            tensor = tensors[layout.name]
            if sum(prod(box.shape) for box in layout.boxes) < tensor.numel():
                tensor.zero_()
            for box in layout.boxes:
                if box.hf not in files:
                    raise DataError(_missing(directory, box.hf, layout.name))
                part = _read(opened(files[box.hf]), files[box.hf], box.hf, box)
                found = str(part.dtype).removeprefix("torch.")
                if found != pinned.get(box.hf, found):
                    raise DataError(
                        f"{box.hf} in {files[box.hf]} is {found}, and the model keeps it in {pinned[box.hf]}: rounded, "
                        "it sends tokens to other experts, and the cast has lost what it was. Take it from the "
                        f"original checkpoint, or, where that has no other, save it as {pinned[box.hf]} yourself."
                    )
                copy_view(tensor, box.offset, box.shape).copy_(part)
                for alias in copies.get(box.hf, ()):
                    if not torch.equal(_read(opened(files[alias]), files[alias], alias, box), part):
                        raise DataError(
                            f"{alias} in {directory} differs from {box.hf}, and the model uses one tensor for both: "
                            "one of the two would be lost. Make them equal, or use the original checkpoint."
                        )


def _read(file: Any, path: Path, name: str, box: Box) -> Tensor:
    """The rectangle of `box`, of the HF tensor `name` in an opened file."""
    source = file.get_slice(name)
    ends = [a + n for a, n in zip(box.hf_offset, box.shape, strict=True)]
    if any(end > size for end, size in zip(ends, source.get_shape(), strict=True)):
        raise DataError(
            f"{name} in {path} has shape {source.get_shape()}, and this rank needs it up to {ends}: "
            "config.json and weights disagree. Use the config.json that belongs to the weights."
        )
    return source[tuple(slice(a, end) for a, end in zip(box.hf_offset, ends, strict=True))]


def _missing(directory: Path, hf: str, layout: str) -> str:
    mend = "Is it another model's?"
    if ":mtp." in layout:
        mend = "transformers saves no multi-token prediction layers: then set num_nextn_predict_layers to 0 in it."
    return f"{directory} has no tensor {hf}, which config.json promises. {mend}"


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


def export_hf(
    directory: Path,
    tensors: Mapping[str, Tensor],
    table: Table,
    topology: MegatronTopology,
    *,
    source: Path,
    rank: int,
    dtype: str,
) -> None:
    """Write this rank's rectangles into a Hugging Face checkpoint in `directory`, which exists; all ranks call this.

    Rank 0 makes the files, with what else lies in the checkpoint `source`. Raises: BackendError when the disk refuses.
    """
    whole = hf_layouts(table, dtype=dtype, aliases=manifest.stored_aliases(source, table))
    try:
        if rank == 0:
            hf_files.copy_companions(source, directory, dtype=dtype)
            hf_files.write_headers(directory, hf_files.split(whole))
        dist.barrier()
        sources = megatron_ranks(table, topology, dtype=dtype)
        mine = [copy for copy in make_plan(sources, {0: whole}) if copy.src_rank == rank]
        write_rectangles(directory, tensors, mine)
    except OSError as error:
        raise BackendError(
            f"The weights could not be exported to {directory} ({error}). Free space there and start the same command "
            "again: what is missing is exported from the last checkpoint."
        ) from error
    dist.barrier()


def write_rectangles(directory: Path, tensors: Mapping[str, Tensor], copies: Iterable[Copy]) -> None:
    """Write this rank's rectangles of a plan to HF layouts into the files that `write_headers` made."""
    places, opened = hf_files.read_checkpoint(directory), dict[str, int]()
    try:
        for copy in copies:
            place = places[copy.dst]
            if place.file not in opened:
                opened[place.file] = os.open(directory / place.file, os.O_RDWR)
            _write(opened[place.file], place.at, place.shape, copy, tensors[copy.src])
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
        hf_files.write_at(fd, data.numpy().tobytes(), base + copy.dst_offset[0] * width * item)
        return
    assert len(shape) == 2, (copy, shape)
    for i, row in enumerate(data.numpy()):
        hf_files.write_at(fd, row.tobytes(), base + ((copy.dst_offset[0] + i) * width + copy.dst_offset[1]) * item)
