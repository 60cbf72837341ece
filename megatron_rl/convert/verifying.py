"""Whether a checkpoint still holds what its import wrote, and what a Hugging Face checkpoint holds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron_rl.convert import fp8
from megatron_rl.convert.reading import Checkpoint, Reader, Wanted, find_checkpoint, wanted
from megatron_rl.convert.source import Source, read_source
from megatron_rl.convert.workers import batches, over_units
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formats import manifest, torch_dist
from megatron_rl.formats.hf_files import Stored
from megatron_rl.formats.manifest import Manifest, TensorEntry

UNIT_BYTES = 256_000_000


@dataclass(frozen=True, slots=True)
class Check:
    """One tensor to read, and what it is compared with."""

    tensor: Wanted
    entry: TensorEntry | None
    """None when the checkpoint has no manifest."""
    hf: Stored | None
    scale: Stored | None


def verify_checkpoint(directory: Path, hf: Path | None, *, processes: int) -> tuple[list[str], list[str]]:
    """Returns: (one line per difference, what to tell the user).

    Raises: ConfigError or DataError when there is nothing to compare with, or a checkpoint is none.
    """
    checkpoint = find_checkpoint(directory)
    known = checkpoint.manifest
    if known is None and hf is None:
        raise ConfigError(
            f"{checkpoint.weights} has no manifest: a run saved it, and nothing says what it should hold. Name a "
            "Hugging Face checkpoint to compare with: --hf DIR"
        )
    differences: list[str] = []
    unreadable: set[str] = set()
    if known is not None:
        differences, unreadable = _files(checkpoint.weights, known, processes=processes)
    if unreadable:
        return differences, [
            f"{len(differences)} differences; without {', '.join(sorted(unreadable))} no tensor is read"
        ]
    source = None if hf is None else read_source(hf, report=directory.with_name(directory.name + ".refused.txt"))
    tensors = wanted(checkpoint)
    checks, absent = _checks(tensors, known, source)
    differences += absent
    units = batches(checks, lambda check: check.tensor.nbytes, UNIT_BYTES)
    work = _Compare(checkpoint, None if source is None else source.directory)
    sizes = [sum(check.tensor.nbytes for check in unit) for unit in units]
    for found in over_units(work, units, sizes, processes=processes, what="tensors"):
        differences += found
    total = sum(sizes)
    what = " and ".join([*(["its manifest"] if known else []), *([str(hf)] if hf else [])])
    verdict = f"{len(differences)} differences between" if differences else "equal:"
    return differences, [f"{verdict} {len(tensors)} tensors, {total / 1e9:.2f} GB, of {checkpoint.weights} and {what}"]


def _files(directory: Path, known: Manifest, *, processes: int) -> tuple[list[str], set[str]]:
    """(one line for each changed file, those without which no tensor can be found)."""
    names = sorted(known.files)
    found = over_units(
        _HashFile(directory), names, [known.files[n].nbytes for n in names], processes=processes, what="files"
    )
    lines = {}
    for name, entry in zip(names, found, strict=True):
        if entry != known.files[name]:
            what = "is missing" if entry is None else f"has {entry.nbytes} bytes, hash {entry.xxh3}"
            lines[name] = f"file {name} {what}; written: {known.files[name].nbytes} bytes, {known.files[name].xxh3}"
    return [*lines.values()], lines.keys() & {torch_dist.METADATA, "config.json"}


@dataclass(frozen=True, slots=True)
class _HashFile:
    directory: Path

    def __call__(self, name: str) -> manifest.FileEntry | None:
        path = self.directory / name
        return manifest.hash_file(path) if path.exists() else None


def _checks(tensors: list[Wanted], known: Manifest | None, source: Source | None) -> tuple[list[Check], list[str]]:
    checks, absent = [], []
    for tensor in tensors:
        entry = None if known is None else known.tensors[tensor.name]
        hf = scale = None
        if source is not None:
            hf, scale = source.on_disk.get(tensor.name), source.scales.get(tensor.name)
            if hf is None:
                absent.append(f"{tensor.name} is not in {source.directory}")
            elif (theirs := (source.dtype(tensor.name), hf.shape)) != (tensor.dtype, tensor.shape):
                words = [f"{dtype} {list(shape)}" for dtype, shape in ((tensor.dtype, tensor.shape), theirs)]
                absent.append(f"{tensor.name} is {words[0]}, in {source.directory} {words[1]}")
                hf = None
        checks.append(Check(tensor, entry, hf, scale))
    if source is not None:
        names = {tensor.name for tensor in tensors}
        absent += [f"{name} is only in {source.directory}" for name in source.on_disk if name not in names]
    return checks, absent


@dataclass(frozen=True, slots=True)
class _Compare:
    """Runs in a worker."""

    checkpoint: Checkpoint
    hf: Path | None

    def __call__(self, unit: list[Check]) -> list[str]:
        lines = []
        with Reader(self.checkpoint.weights) as reader:
            for check in unit:
                try:
                    lines += self._compare(reader, check)
                except DataError as error:
                    lines.append(f"{check.tensor.name} cannot be read: {error}")
        return lines

    def _compare(self, reader: Reader, check: Check) -> list[str]:
        digest = xxhash.xxh3_128()
        first = ""
        for row, window in reader.windows(check.tensor):
            digest.update(memoryview(window).cast("B"))
            if check.hf is not None and not first:
                assert self.hf is not None
                first = _first_difference(check, row, window, _hf_rows(self.hf, check, row, len(window)))
        lines = []
        if first:
            lines.append(f"{check.tensor.name}{first}")
        if check.entry is not None and digest.hexdigest() != check.entry.xxh3:
            lines.append(f"{check.tensor.name} hashes to {digest.hexdigest()}, at its import {check.entry.xxh3}")
        return lines


def _hf_rows(directory: Path, check: Check, row: int, rows: int) -> np.ndarray:
    """uint8 [rows, bytes of a row] as the checkpoint should hold them."""
    hf, columns = check.hf, check.tensor.columns
    assert hf is not None
    row_bytes = hf.nbytes // max(hf.shape[0], 1)
    data = np.fromfile(directory / hf.file, np.uint8, rows * row_bytes, offset=hf.at + row * row_bytes)
    if check.scale is not None:
        scale = fp8.read_scale(directory, check.scale)
        data = np.frombuffer(b"".join(fp8.dequantize(data, scale, first_row=row, columns=columns)), np.uint8)
    return data.reshape(rows, -1)


def _first_difference(check: Check, row: int, ours: np.ndarray, theirs: np.ndarray) -> str:
    """ "" when equal; else where and what."""
    if np.array_equal(ours, theirs):
        return ""
    itemsize = ours.shape[1] // check.tensor.columns
    differing = (ours != theirs).reshape(len(ours), check.tensor.columns, itemsize).any(axis=2)
    r, c = map(int, np.unravel_index(int(differing.argmax()), differing.shape))
    place = [row + r, c][: len(check.tensor.shape)]
    a, b = (FLOATS[check.tensor.dtype](x[r, c * itemsize : (c + 1) * itemsize].tobytes()) for x in (ours, theirs))
    return f" differs first at {place}: {a:.9g} here, {b:.9g} there, {int(differing.sum())} elements in this window"


FLOATS: dict[str, Callable[[bytes], float]] = {
    "bfloat16": lambda data: float(np.frombuffer(b"\0\0" + data, np.float32)[0]),
    "float16": lambda data: float(np.frombuffer(data, np.float16)[0]),
    "float32": lambda data: float(np.frombuffer(data, np.float32)[0]),
}
"""The number that the bytes of an element are."""
