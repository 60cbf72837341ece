"""megatron-core's torch_dist format, as torch.distributed.checkpoint 2.14 reads it: rectangles of global tensors in
.distcp files, each as torch.save writes it, and one pickled .metadata that says where they lie.

Functions that need torch import it themselves: workers that only move bytes stay small.
"""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError

METADATA, BACKEND = ".metadata", "metadata.json"
SUFFIX = ".distcp"


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a rank's tensor, and where it lies in the checkpoint's tensor `key`."""

    key: str
    size: tuple[int, ...]
    """Of the checkpoint's tensor; may have leading dims (layer, expert) that the rank's tensor lacks."""
    offset: tuple[int, ...]
    """Its first element there."""
    start: tuple[int, ...]
    """Its first element in the rank's tensor."""
    shape: tuple[int, ...]
    padded: bool
    """Whether `size` counts rows of padding, which a checkpoint may leave out (the vocabulary)."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model's tensors on a single rank."""

    pieces: Mapping[str, tuple[Piece, ...]]
    """By name in the layout table."""
    objects: tuple[str, ...]
    """Keys of what is no tensor; without FP8 each holds None."""


@dataclass(frozen=True, slots=True)
class Item:
    """A rectangle of the checkpoint's tensor `key`, and the bytes of a file that hold it as torch.save wrote it."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds."""

    dtypes: Mapping[str, str]
    """By key; of its first rectangle, where they differ."""
    items: Mapping[str, tuple[Item, ...]]


def envelope(dtype: str, shape: Sequence[int]) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the data of a contiguous tensor. Takes memory for the tensor, twice."""
    import torch

    # A checksum would differ with the data; torch's reader does not look at it.
    torch.serialization.set_crc32_options(False)
    tensor = torch.zeros(tuple(shape), dtype=getattr(torch, dtype))
    file = io.BytesIO()
    torch.save(tensor, file)
    view = file.getbuffer()
    at, nbytes = _record(file, len(view))
    assert nbytes == tensor.nbytes, (nbytes, tensor.nbytes)
    return bytes(view[:at]), bytes(view[at + nbytes :])


def data_of(file: io.BufferedIOBase, item: Item, *, itemsize: int) -> int:
    """Where in `file` the elements of `item` begin, row by row. Raises: DataError when they are stored otherwise."""
    try:
        at, nbytes = _record(_View(file, item.at, item.nbytes), item.nbytes)
    except (zipfile.BadZipFile, NotImplementedError, KeyError, ValueError, OSError) as error:
        raise DataError(
            f"{item.file} is damaged: {item.key} at {item.offset} is not what torch.save writes ({error}). Take the "
            "checkpoint from where it is whole, or import it again."
        ) from error
    if nbytes != prod(item.shape) * itemsize:
        raise DataError(
            f"{item.file} holds {nbytes} bytes for {item.key} at {item.offset}, {item.shape} takes "
            f"{prod(item.shape) * itemsize}: its dtype is another, or it is a view. Save the checkpoint again with "
            "contiguous tensors of one dtype."
        )
    return item.at + at


def _record(file: Any, nbytes: int) -> tuple[int, int]:
    """(where, bytes) of the only storage in a file that torch.save wrote. Zip: local headers have their own extras."""
    with zipfile.ZipFile(file) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("/data/0")]
    file.seek(info.header_offset)
    header = file.read(30)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + lengths, info.file_size


class _View(io.RawIOBase):
    """Part of an open file, as zipfile wants to see it."""

    def __init__(self, file: io.BufferedIOBase, start: int, length: int):
        self.file, self.start, self.length, self.position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(self.length - self.position, 0)
        size = left if size < 0 else min(size, left)
        self.file.seek(self.start + self.position)
        data = self.file.read(size)
        self.position += len(data)
        return data


def write_metadata(
    directory: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]], items: Iterable[Item], objects: Iterable[str]
) -> None:
    """Write .metadata, metadata.json, and one file with the objects (None each) and the empty common state.

    `tensors`: (size, dtype) by key.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    meta: dict[str, Any] = {}
    for key, (size, dtype) in tensors.items():
        properties = TensorProperties(dtype=getattr(torch, dtype))
        meta[key] = TensorStorageMetadata(properties, torch.Size(size), [])
    storage = {}
    for item in items:
        meta[item.key].chunks.append(ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.shape)))
        storage[MetadataIndex(item.key, item.offset)] = _StorageInfo(item.file, item.at, item.nbytes)
    file = "__0_0" + SUFFIX
    with open(directory / file, "wb") as f:
        # As megatron's ShardedObject: a list of one. All that hold None share the same bytes.
        torch.save([None], f)
        none = _StorageInfo(file, 0, f.tell())
        torch.save([{}], f)
        common = _StorageInfo(file, none.length, f.tell() - none.length)
        os.fsync(f.fileno())
    for key, info in [*((key, none) for key in objects), ("common_state/shard_0_1", common)]:
        meta[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = info
    with open(directory / METADATA, "wb") as f:
        pickle.dump(Metadata(meta, storage_data=storage), f)
        os.fsync(f.fileno())
    (directory / BACKEND).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def read_contents(directory: Path) -> Contents:
    """Raises: DataError when `directory` is no torch_dist checkpoint, or its .metadata is damaged."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    if not is_torch_dist(directory):
        raise DataError(
            f"{directory} holds no {METADATA}: it is no torch_dist checkpoint of megatron-core. Name the directory "
            "that `import` wrote, or a run's checkpoints/step_NNNNNN."
        )
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError, OSError) as error:
        raise DataError(
            f"{directory / METADATA} cannot be read ({type(error).__name__} {error}): it was changed or cut after it "
            "was written. Take the checkpoint from where it is whole, or import it again."
        ) from error
    dtypes, items = {}, {}
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            dtypes[key] = str(tensor.properties.dtype).removeprefix("torch.")
            found = []
            for chunk in tensor.chunks:
                info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                place = (tuple(chunk.offsets), tuple(chunk.sizes))
                found.append(Item(key, *place, info.relative_path, info.offset, info.length))
            items[key] = tuple(found)
    return Contents(dtypes, items)


def is_torch_dist(directory: Path) -> bool:
    """Whether weights in torch_dist format lie here."""
    return (directory / METADATA).exists()
