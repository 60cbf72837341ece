"""Hugging Face -> torch_dist. Every HF tensor is written as rectangles of its own, in bounded units that are kept when
the process dies; what is whole appears by one rename.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import xxhash

from megatron_rl.convert import fp8, source
from megatron_rl.convert.placement import Placement, check_placement, find_placement
from megatron_rl.convert.source import Source, fingerprint, read_source
from megatron_rl.convert.unfinished import WHOLE, check_space, own, partial_of, refuse_full, write_record
from megatron_rl.convert.workers import Child, batches, over_units
from megatron_rl.errors import BackendError, DataError
from megatron_rl.formats import manifest, torch_dist
from megatron_rl.formats.hf_files import MANIFEST, Stored, companions, write_at
from megatron_rl.formats.manifest import FileEntry, Manifest, TensorEntry
from megatron_rl.formats.torch_dist import Item
from megatron_rl.formats.torch_save import envelope
from megatron_rl.layouts.boxes import NBYTES

PIECE_BYTES = 32_000_000
"""An item; a row that takes more is alone."""
BLOCK_BYTES = 1 << 20
"""Read and written at once: what stays in a cache between reading, hashing and writing."""
UNIT_BYTES, UNITS = 256_000_000, 64
"""A unit, which is what a kill loses, is at most the first and at most a share of so many."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of an HF tensor that become one item."""

    row: int
    rows: int
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """An HF tensor to write."""

    tensor: Stored
    dtype: str
    """As written."""
    parts: tuple[Part, ...]
    scale: Stored | None


@dataclass(frozen=True, slots=True)
class Unit:
    """One file of the checkpoint."""

    number: int
    """From 1 on."""
    jobs: tuple[Job, ...]
    source: Path
    partial: Path

    @property
    def file(self) -> str:
        return f"__{self.number}_0{torch_dist.SUFFIX}"

    @property
    def record(self) -> Path:
        """Of what the file holds; there once the file is whole."""
        return self.partial / f"unit-{self.number}.json"

    @property
    def nbytes(self) -> int:
        """To write, envelopes left out."""
        return sum(prod(job.tensor.shape) * NBYTES[job.dtype] for job in self.jobs)


def import_checkpoint(directory: Path, out: Path, *, processes: int) -> list[str]:
    """Convert the HF checkpoint in `directory` into `out`. Returns: what to tell the user.

    Raises: ConfigError, DataError, LayoutError for what would be wrong or lost, BackendError when a disk or a process
    fails; the same call then goes on where this one ended.
    """
    refuse_full(out)
    found = read_source(directory, report=out.with_name(out.name + ".refused.txt"))
    total = sum(prod(t.shape) * NBYTES[found.dtype(name)] for name, t in found.tensors.items())
    unit_bytes = max(min(UNIT_BYTES, total // UNITS), 1)
    partial = partial_of(out)
    done = sum(path.stat().st_size for path in (partial / WHOLE).glob("*" + torch_dist.SUFFIX))
    beside = sum(path.stat().st_size for path in companions(directory))
    check_space(total + beside - done, out)
    with own(partial, fingerprint(found, unit_bytes=unit_bytes)), Child() as child:
        placement = find_placement(found.config)
        child.start(check_placement, found.config, placement)  # takes as long as to copy gigabytes
        units = _units(found, placement, partial, unit_bytes)
        todo = [unit for unit in units if not unit.record.exists()]
        over_units(write_unit, todo, [unit.nbytes for unit in todo], processes=processes, what="import")
        _finish(found, placement, units, partial / WHOLE, child)
        os.rename(partial / WHOLE, out)
    shutil.rmtree(partial)
    notes = [f"{len(found.tensors)} tensors, {total / 1e9:.2f} GB -> {out}"]
    if len(todo) < len(units):
        notes.append(f"resumed: {len(units) - len(todo)} of {len(units)} units were there already")
    if found.derived:
        notes.append(f"left out {len(found.derived)} buffers that follow from config.json: {found.derived[0]}, ...")
    if found.aliases:
        notes.append(f"{len(found.aliases)} tensors are copies of others, and equal: {', '.join(found.aliases)}")
    if found.scales:
        notes.append(f"{len(found.scales)} FP8 tensors are now bfloat16")
    return notes


def _units(found: Source, placement: Placement, partial: Path, unit_bytes: int) -> list[Unit]:
    jobs = []
    for name, tensor in found.tensors.items():
        dtype = found.dtype(name)
        parts = tuple(_parts(placement, name, itemsize=NBYTES[dtype]))
        jobs.append(Job(tensor, dtype, parts, found.scales.get(name)))
    groups = batches(jobs, lambda job: job.tensor.nbytes, unit_bytes)
    return [Unit(i + 1, tuple(group), found.directory, partial) for i, group in enumerate(groups)]


def _parts(placement: Placement, name: str, *, itemsize: int) -> Iterator[Part]:
    for spot in placement.spots[name]:
        rows, lead = spot.shape[0], len(spot.offset) - len(spot.shape)
        step = max(PIECE_BYTES // (prod(spot.shape[1:]) * itemsize), 1)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            offset = (*spot.offset[:lead], spot.offset[lead] + first, *spot.offset[lead + 1 :])
            shape = (*(1 for _ in range(lead)), count, *spot.shape[1:])
            yield Part(spot.hf_offset[0] + first, count, spot.key, offset, shape)


def write_unit(unit: Unit) -> None:
    """Write one file and its record, each whole or not at all. Runs in a worker."""
    items: list[Item] = []
    hashes: dict[str, str] = {}
    whole, at = xxhash.xxh3_128(), 0
    temporary = unit.partial / f"{unit.file}.tmp"
    try:
        with open(temporary, "wb", buffering=0) as out:
            for job in unit.jobs:
                digest = xxhash.xxh3_128()
                for part, blocks in _read_parts(unit.source, job):
                    before, after = envelope(job.dtype, part.shape)
                    start = at
                    for block in chain([before], _hashed(blocks, digest), [after]):
                        whole.update(block)
                        write_at(out.fileno(), block, at)
                        at += len(block)
                    items.append(Item(part.key, part.offset, part.shape, unit.file, start, at - start))
                hashes[job.tensor.name] = digest.hexdigest()
            os.fsync(out.fileno())
            # Nobody reads it soon, and the next file goes into memory that is warm instead of new or taken from others.
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.rename(temporary, unit.partial / WHOLE / unit.file)
        record = {"file": [at, whole.hexdigest()], "hashes": hashes, "items": [asdict(item) for item in items]}
        write_record(unit.record, record)
    except OSError as error:
        raise BackendError(
            f"Writing {temporary} failed: {error}. Free space there; the same command then goes on from here."
        ) from error


def _hashed(blocks: Iterable[bytes | memoryview], digest: xxhash.xxh3_128) -> Iterator[bytes | memoryview]:
    for block in blocks:
        digest.update(block)
        yield block


def _read_parts(directory: Path, job: Job) -> Iterator[tuple[Part, Iterator[bytes | memoryview]]]:
    """The parts of a tensor, each with its bytes as written, block by block; the next step overwrites a block."""
    tensor = job.tensor
    row_bytes = prod(tensor.shape[1:]) * NBYTES[tensor.dtype]
    with open(directory / tensor.file, "rb", buffering=0) as f:
        for part in job.parts:
            f.seek(tensor.at + part.row * row_bytes)
            nbytes = part.rows * row_bytes
            if job.scale is None:
                yield part, _blocks(f.fileno(), nbytes, BLOCK_BYTES)
                continue
            scale = fp8.read_scale(directory, job.scale)
            (data,) = _blocks(f.fileno(), nbytes, nbytes)
            array = np.frombuffer(data, np.uint8)
            yield part, fp8.dequantize(array, scale, first_row=part.row, columns=tensor.shape[1])


def _blocks(fd: int, nbytes: int, size: int) -> Iterator[memoryview]:
    """The next `nbytes` of a file, in one buffer."""
    buffer = memoryview(bytearray(min(size, nbytes)))
    for start in range(0, nbytes, size):
        block = left = buffer[: min(size, nbytes - start)]
        while left:
            count = os.readv(fd, [left])
            if not count:
                raise DataError("A file ends before its header says: it was cut while it was read. Take it whole.")
            left = left[count:]
        yield block


def _finish(found: Source, placement: Placement, units: Sequence[Unit], directory: Path, child: Child) -> None:
    """Everything but the tensors' data: metadata, companions, manifest."""
    items: list[Item] = []
    hashes: dict[str, str] = {}
    files: dict[str, FileEntry] = {}
    for unit in units:
        record = json.loads(unit.record.read_text())
        items += [Item(**{**i, "offset": tuple(i["offset"]), "shape": tuple(i["shape"])}) for i in record["items"]]
        hashes |= record["hashes"]
        files[unit.file] = FileEntry(*record["file"])
    dtypes = {part.key: job.dtype for unit in units for job in unit.jobs for part in job.parts}
    tensors = {key: (size, dtypes[key]) for key, size in placement.sizes.items()}
    objects = child.result()
    child.start(torch_dist.write_metadata, directory, tensors, items, objects)
    child.result()
    for path in companions(found.directory):
        shutil.copyfile(path, directory / path.name)
    source.write_config(found, directory)
    others = [path for path in sorted(directory.iterdir()) if path.name not in files and path.name != MANIFEST]
    files |= {path.name: manifest.hash_file(path) for path in others}
    entries = {
        name: TensorEntry(found.dtype(name), t.shape, hashes[found.aliases.get(name, name)], t.file)
        for name, t in found.on_disk.items()
    }
    manifest.write(directory, Manifest(entries, files, found.aliases, from_fp8=bool(found.scales)))
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
