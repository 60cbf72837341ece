"""Hugging Face checkpoints on disk: headers and indices of safetensors files, and the files that go with weights."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formats.torch_dist import BACKEND, METADATA, SUFFIX
from megatron_rl.layouts.boxes import NBYTES

FILE_BYTES = 5_000_000_000
"""Tensors of a checkpoint file that is written here; a larger tensor has a file of its own."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MANIFEST = "manifest.json"
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", SUFFIX)
"""Suffixes of files that are not companions."""


class Described(Protocol):
    """What a header says of a tensor; `layouts.boxes.TensorLayout` is one."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch calls it, or as the file does where no weights have it."""
    file: str
    at: int
    """First byte in the file."""
    nbytes: int


def read_hf_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises: ConfigError when there is none."""
    path = directory / "config.json"
    try:
        hf = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{directory} has no readable config.json ({error.strerror}). "
            "Set model.path (or --hf) to the directory of a Hugging Face checkpoint."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Copy it again.") from error
    if not isinstance(hf, dict):
        raise ConfigError(f"{path} holds a {type(hf).__name__}, not an object. Copy it again.")
    return hf


def read_checkpoint(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, in the order of files and bytes.

    Raises: DataError when a file is missing, truncated or not safetensors, or index and files disagree.
    """
    places = _index(directory)
    if places is None:
        return {tensor.name: tensor for tensor in read_header(directory / SINGLE)}
    tensors = [tensor for file in sorted(set(places.values())) for tensor in read_header(directory / file)]
    # A tensor that two files hold is wrong in one of them.
    if wrong := sorted({name for name, _ in places.items() ^ {(tensor.name, tensor.file) for tensor in tensors}}):
        raise DataError(
            f"{directory / INDEX} and the files disagree about {len(wrong)} tensors ({', '.join(wrong[:10])}): "
            "they are of two downloads. Download the checkpoint again."
        )
    return {tensor.name: tensor for tensor in tensors}


def files_of(directory: Path) -> dict[str, Path]:
    """HF tensor name -> the safetensors file that holds it.

    Raises: DataError when the directory holds no safetensors checkpoint or a file of it is missing.
    """
    places = _index(directory)
    if places is None:
        return {tensor.name: directory / SINGLE for tensor in read_header(directory / SINGLE)}
    return {name: directory / file for name, file in places.items()}


def _index(directory: Path) -> dict[str, str] | None:
    """File of each tensor, as the index says; None for a checkpoint of a single file."""
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
            raise DataError(
                f"{directory} holds neither {SINGLE} nor {INDEX}: there are no weights to start from. Point at a "
                "Hugging Face checkpoint in safetensors format."
            )
        return None
    try:
        found = json.loads((directory / INDEX).read_text())["weight_map"]
        places = {name: str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{directory / INDEX} is no index of weights ({error}). Download it again.") from error
    for file in set(places.values()):
        if not (directory / file).exists():
            raise DataError(
                f"{directory / file} is missing, though {directory / INDEX} names it. Download the checkpoint again."
            )
    return places


def read_header(path: Path) -> list[Stored]:
    """The tensors of a file, in the order of their bytes.

    Raises: DataError when it is truncated, not in safetensors format, or its tensors do not follow one another.
    """
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        text = f.read(length) if length < size else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [_stored(name, entry, path.name, 8 + length) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not in safetensors format: its first bytes are no header of tensors. Download it again, or "
            "save the weights with safetensors."
        ) from error
    tensors.sort(key=lambda tensor: (tensor.at, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.at != end:
            raise DataError(
                f"{path} has {tensor.name} at byte {tensor.at}, what is before it ends at {end}: its tensors overlap "
                "or leave gaps, and one of them is not what it was. Download it again."
            )
        end += tensor.nbytes
    if end != size:
        raise DataError(
            f"{path} has {size} bytes, its header promises {end}: it was "
            f"{'truncated' if size < end else 'written twice or changed'}. Download it again."
        )
    return tensors


def _stored(name: str, entry: Mapping[str, Any], file: str, base: int) -> Stored:
    torch_names = {short: name for name, short in SAFETENSORS_DTYPES.items()}
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), torch_names.get(entry["dtype"], entry["dtype"])
    if dtype in NBYTES and end - start != prod(shape) * NBYTES[dtype]:
        raise ValueError(f"{name}: {end - start} bytes for {shape} {dtype}")
    return Stored(name, shape, dtype, file, base + start, end - start)


def split(tensors: Sequence[Described]) -> dict[str, list[Described]]:
    """Which file each tensor goes to when nothing says otherwise: in order, `FILE_BYTES` a file."""
    groups: list[list[Described]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + nbytes(tensor) > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes(tensor)
    return {_file_name(i, len(groups)): group for i, group in enumerate(groups)}


def nbytes(tensor: Described) -> int:
    """Of the tensor's elements."""
    return prod(tensor.shape) * NBYTES[tensor.dtype]


def write_headers(directory: Path, files: Mapping[str, Sequence[Described]]) -> dict[str, Stored]:
    """Create the files of a checkpoint at their full size, with headers and without data; and the index.

    Returns: where each tensor belongs.
    """
    stored: dict[str, Stored] = {}
    for name, group in files.items():
        header, at = {}, 0
        for tensor in group:
            end = at + nbytes(tensor)
            dtype = SAFETENSORS_DTYPES[tensor.dtype]
            header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / name, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + at)
        stored |= {tensor.name: tensor for tensor in read_header(directory / name)}
    if list(files) != [SINGLE]:
        index = {tensor.name: tensor.file for tensor in stored.values()}
        total = sum(tensor.nbytes for tensor in stored.values())
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    return stored


def write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at a place of an open file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _file_name(i: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def companions(directory: Path) -> Iterator[Path]:
    """Config, tokenizer, generation config: every file but weights and what describes them."""
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix not in WEIGHTS and path.name not in (INDEX, MANIFEST, METADATA, BACKEND):
            yield path


def copy_companions(source: Path, directory: Path, *, dtype: str) -> None:
    """Copy them, with the written dtype in config.json."""
    for path in companions(source):
        shutil.copyfile(path, directory / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
