"""manifest.json of a converted checkpoint: what every HF tensor and every file of it hash to."""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.errors import DataError
from megatron_rl.formats.hf_files import MANIFEST, files_of
from megatron_rl.formats.torch_dist import is_torch_dist
from megatron_rl.layouts.table import Table

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """An HF tensor as the checkpoint holds it."""

    dtype: str
    shape: tuple[int, ...]
    xxh3: str
    """xxh3_128 of its elements, row by row, little-endian; of the bfloat16 ones where the source had FP8."""
    file: str
    """The safetensors file it came from."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint."""

    nbytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an import wrote."""

    tensors: Mapping[str, TensorEntry]
    """In the order of files and bytes."""
    files: Mapping[str, FileEntry]
    """Every file but the manifest itself."""
    aliases: Mapping[str, str]
    """HF tensors of the source that are copies of another; the checkpoint holds only the other."""
    from_fp8: bool
    """Whether the source was block-scaled FP8."""


def write(directory: Path, manifest: Manifest) -> None:
    """Write it; the directory's other files are whole."""
    content = asdict(manifest)
    with open(directory / MANIFEST, "w") as f:
        json.dump({**content, "xxh3": _hash(content)}, f)
        f.flush()
        os.fsync(f.fileno())


def _hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def read(directory: Path) -> Manifest | None:
    """None where there is none: a run's own checkpoint. Raises: DataError when it is damaged."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        if found.pop("xxh3") != _hash(found):
            raise ValueError("it hashes to something else than it says")
        return Manifest(
            tensors={n: TensorEntry(**{**e, "shape": tuple(e["shape"])}) for n, e in found["tensors"].items()},
            files={n: FileEntry(**e) for n, e in found["files"].items()},
            aliases=found["aliases"],
            from_fp8=found["from_fp8"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is no manifest ({type(error).__name__} {error}): it was changed after it was written, and nothing "
            "else says whether the weights are whole. Import the checkpoint again."
        ) from error


def hash_file(path: Path) -> FileEntry:
    """Reads all of it."""
    digest, size, buffer = xxhash.xxh3_128(), 0, bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as f:
        while count := f.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def check_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises: DataError naming the first of `names` whose bytes are not those that were written."""
    for name in names:
        path, entry = directory / name, manifest.files[name]
        found = hash_file(path) if path.exists() else None
        if found != entry:
            what = "is missing" if found is None else f"has {found.nbytes} bytes that hash to {found.xxh3}"
            raise DataError(
                f"{path} {what}, and {MANIFEST} says {entry.nbytes} bytes and {entry.xxh3}: it was changed after it "
                f"was written. `python tools/convert verify --checkpoint {directory}` says which tensors differ; "
                "import the checkpoint again."
            )


def stored_aliases(source: Path, table: Table) -> list[str]:
    """Of the table's aliases, those that the checkpoint at `source` holds, or held before it was converted."""
    if is_torch_dist(source):
        written = read(source)
        stored: Collection[str] = written.aliases if written else ()
    else:
        stored = files_of(source)
    return [name for name in table.aliases if name in stored]
