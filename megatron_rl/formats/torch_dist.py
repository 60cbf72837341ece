"""megatron-core's torch_dist format, as torch.distributed.checkpoint 2.14 reads it: rectangles of global tensors in
.distcp files, each as torch.save writes it, and one pickled .metadata that says where they lie.

Only writing .metadata takes torch, and imports it then.
"""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError
from megatron_rl.formats import torch_save

METADATA, BACKEND = ".metadata", "metadata.json"
SUFFIX = ".distcp"
DAMAGE = (
    *(pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, OSError),
    *(MemoryError, OverflowError),  # a length is a number that a flipped bit makes large
)
"""What reading a pickle raises that was changed."""


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


def data_of(file: io.RawIOBase, item: Item, *, itemsize: int) -> int:
    """Where in `file` the elements of `item` begin, row by row. Raises: DataError when they are stored otherwise."""
    try:
        at, nbytes = torch_save.find_data(file, item.at, item.nbytes)
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
    return at


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
    if not is_torch_dist(directory):
        raise DataError(
            f"{directory} holds no {METADATA}: it is no torch_dist checkpoint of megatron-core. Name the directory "
            "that `import` wrote, or a run's checkpoints/step_NNNNNN."
        )
    try:
        with open(directory / METADATA, "rb") as f:
            return _contents(_Unpickler(f).load())
    except DAMAGE as error:
        raise DataError(
            f"{directory / METADATA} cannot be read ({type(error).__name__} {error}): it was changed or cut after it "
            "was written. Take the checkpoint from where it is whole, or import it again."
        ) from error


class _Made:
    """Stands for an object of any class: nothing of that class runs, and torch need not be there."""

    def __init__(self, *args: object):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return tuple if (module, name) == ("torch", "Size") else type(name, (_Made,), {})


def _contents(metadata: Any) -> Contents:
    """Of torch.distributed.checkpoint.metadata.Metadata, by the names of its fields there."""
    found = metadata.state
    indices = ((index.state, info.state) for index, info in found["storage_data"].items())
    places = {(index["fqn"], tuple(index.get("offset", ()))): info for index, info in indices}  # bytes have no offset
    dtypes, items = {}, {}
    for key, tensor in found["state_dict_metadata"].items():
        if type(tensor).__name__ != "TensorStorageMetadata":
            continue
        dtypes[key] = tensor.state["properties"].state[0].__name__
        own = []
        for chunk in tensor.state["chunks"]:
            offset, shape = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
            info = places[key, offset]
            own.append(Item(key, offset, shape, info["relative_path"], info["offset"], info["length"]))
        items[key] = tuple(own)
    return Contents(dtypes, items)


def is_torch_dist(directory: Path) -> bool:
    """Whether weights in torch_dist format lie here."""
    return (directory / METADATA).exists()
