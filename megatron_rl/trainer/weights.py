"""Weights between a rank and Hugging Face checkpoints, by the layout table. No rank ever holds a whole model."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from safetensors import safe_open
from torch import Tensor

from megatron_rl.errors import BackendError, DataError
from megatron_rl.layouts.boxes import DTYPE_BYTES, TensorLayout
from megatron_rl.resharding.execute import check_tensors, copy_view
from megatron_rl.resharding.plan import Copy

FILE_BYTES = 5_000_000_000
"""Tensors of a checkpoint file that is written here; a larger tensor has a file of its own."""
INDEX = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def named_tensors(chunks: Sequence[DistributedDataParallel], layouts: Sequence[TensorLayout]) -> dict[str, Tensor]:
    """This rank's tensors under their layout names. Raises: LayoutError when they are not what the table declares."""
    tensors: dict[str, Tensor] = {}
    for i, chunk in enumerate(chunks):
        tensors |= {f"{i}:{name}": p.detach() for name, p in chunk.module.named_parameters()}
        tensors |= {f"{i}:{name}": b for name, b in chunk.module.named_buffers() if name.endswith("router.expert_bias")}
    check_tensors(tensors, layouts, whose="The trainer's model")
    return tensors


def files_of(directory: Path) -> dict[str, Path]:
    """HF tensor name -> the safetensors file that holds it.

    Raises: DataError when the directory holds no safetensors checkpoint or a file of it is missing.
    """
    if (directory / INDEX).exists():
        files = {
            name: directory / file for name, file in json.loads((directory / INDEX).read_text())["weight_map"].items()
        }
    elif (single := directory / "model.safetensors").exists():
        with safe_open(single, "pt") as f:
            files = dict.fromkeys(f.keys(), single)
    else:
        raise DataError(
            f"{directory} holds neither model.safetensors nor {INDEX}: there are no weights to start from. Point "
            "model.path at a Hugging Face checkpoint in safetensors format."
        )
    for path in set(files.values()):
        if not path.exists():
            raise DataError(f"{path} is missing, though {directory / INDEX} names it. Download the checkpoint again.")
    return files


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


def write_headers(directory: Path, layouts: Sequence[TensorLayout]) -> None:
    """Create the safetensors files of a checkpoint at their full size, with headers and without data; and the index."""
    groups = list(_by_file(layouts))
    names = [_file_name(i, len(groups)) for i in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        header, at = {}, 0
        for layout in group:
            end = at + _nbytes(layout)
            dtype = SAFETENSORS_DTYPES[layout.dtype]
            header[layout.name] = {"dtype": dtype, "shape": list(layout.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / name, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + at)
    if len(groups) > 1:
        index = {layout.name: name for name, group in zip(names, groups, strict=True) for layout in group}
        total = sum(_nbytes(layout) for layout in layouts)
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))


def write_rectangles(directory: Path, tensors: Mapping[str, Tensor], copies: Iterable[Copy]) -> None:
    """Write this rank's rectangles of a plan to HF layouts into the files that `write_headers` made."""
    opened: dict[str, tuple[int, int, dict]] = {}
    places: dict[str, tuple[int, int, dict]] = {}
    try:
        for name, path in files_of(directory).items():
            if str(path) not in opened:
                fd = os.open(path, os.O_RDWR)
                size = int.from_bytes(os.pread(fd, 8, 0), "little")
                opened[str(path)] = (fd, 8 + size, json.loads(os.pread(fd, size, 8)))
            places[name] = opened[str(path)]
        for copy in copies:
            fd, base, header = places[copy.dst]
            entry = header[copy.dst]
            _write(fd, base + entry["data_offsets"][0], entry["shape"], copy, tensors[copy.src])
    except OSError as error:
        raise BackendError(f"Writing the checkpoint below {directory} failed: {error}. Free space there.") from error
    finally:
        for fd, _, _ in opened.values():
            os.close(fd)


def copy_companions(source: Path, directory: Path, *, dtype: str) -> None:
    """Config (with the written dtype), tokenizer and generation config: every file but weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth") and path.name != INDEX:
            shutil.copyfile(path, directory / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")


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


def _nbytes(layout: TensorLayout) -> int:
    return prod(layout.shape) * DTYPE_BYTES[layout.dtype]


def _by_file(layouts: Sequence[TensorLayout]) -> Iterator[list[TensorLayout]]:
    group: list[TensorLayout] = []
    size = 0
    for layout in layouts:
        if group and size + _nbytes(layout) > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(layout)
        size += _nbytes(layout)
    yield group


def _file_name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
