"""torch_dist -> Hugging Face safetensors: the files of the import again, or new ones for what a run has trained."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron_rl.convert import fp8
from megatron_rl.convert.reading import Checkpoint, Reader, Wanted, find_checkpoint, wanted
from megatron_rl.convert.unfinished import WHOLE, check_space, own, partial_of, refuse_full, write_record
from megatron_rl.convert.workers import batches, over_units
from megatron_rl.errors import BackendError
from megatron_rl.formats import hf_files, manifest, torch_dist
from megatron_rl.formats.hf_files import Stored
from megatron_rl.layouts.fp8 import BLOCK, DTYPE, SCALE, is_quantized, scale_shape

UNIT_BYTES = 256_000_000
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class New:
    """A tensor of the export."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that one worker writes, and where."""

    number: int
    tensors: tuple[Wanted, ...]
    places: Mapping[str, Stored]
    weights: Path
    partial: Path

    @property
    def record(self) -> Path:
        """Of the hashes; there once the tensors are written. They may not be on disk: it is for this boot only."""
        return self.partial / f"unit-{self.number}-{BOOT.read_text().strip()}.json"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def export_checkpoint(directory: Path, out: Path, *, processes: int, quantize: bool) -> tuple[list[str], list[str]]:
    """Write an HF checkpoint. Returns: (tensors that differ from the manifest, what to tell the user).

    When tensors differ, `out` is not made.
    Raises: ConfigError, DataError, LayoutError for what cannot be exported, BackendError when a disk fails.
    """
    refuse_full(out)
    checkpoint = find_checkpoint(directory)
    if known := checkpoint.manifest:  # tensors are hashed while they are written
        others = [name for name in known.files if not name.endswith(torch_dist.SUFFIX)]
        manifest.check_files(checkpoint.weights, known, others)
    partial = partial_of(out)
    tensors = wanted(checkpoint)
    files = _files(checkpoint, tensors, quantize=quantize)
    total = sum(hf_files.nbytes(tensor) for group in files.values() for tensor in group)
    done = sum(path.stat().st_blocks * 512 for path in (partial / WHOLE).glob("*.safetensors"))
    beside = sum(path.stat().st_size for path in hf_files.companions(checkpoint.model))
    check_space(total + beside - done, out)
    with own(partial, _fingerprint(checkpoint, quantize=quantize)):
        places = _headers(partial / WHOLE, files)
        groups = batches(tensors, lambda tensor: tensor.nbytes, UNIT_BYTES)
        units = []
        for i, group in enumerate(groups):
            names = [name for t in group for name in (t.name, t.name + SCALE) if name in places]
            own_places = {name: places[name] for name in names}
            units.append(Unit(i, tuple(group), own_places, checkpoint.weights, partial))
        todo = [unit for unit in units if not unit.record.exists()]
        over_units(write_unit, todo, [unit.nbytes for unit in todo], processes=processes, what="export")
        hashes: dict[str, str] = {}
        for unit in units:
            hashes |= json.loads(unit.record.read_text())
        entries = {} if known is None else known.tensors
        differing = [name for name, entry in entries.items() if hashes[name] != entry.xxh3]
        if not differing:
            _to_disk(partial / WHOLE)
            _companions(checkpoint, partial / WHOLE, tensors, quantize=quantize)
            os.rename(partial / WHOLE, out)
    shutil.rmtree(partial)
    notes = [f"{len(places)} tensors, {total / 1e9:.2f} GB -> {out}"]
    if checkpoint.manifest is None:
        notes.append(f"{checkpoint.weights} has no manifest: nothing says what its tensors should hash to")
        notes.append(f"config and tokenizer are those of {checkpoint.model}")
    return differing, notes


def _fingerprint(checkpoint: Checkpoint, *, quantize: bool) -> dict[str, object]:
    stats = {name: os.stat(checkpoint.weights / name) for name in sorted(os.listdir(checkpoint.weights))}
    files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    return {"source": os.path.abspath(checkpoint.weights), "files": files, "fp8": quantize}


def _files(checkpoint: Checkpoint, tensors: Sequence[Wanted], *, quantize: bool) -> dict[str, list[New]]:
    """The tensors of each file, in order."""
    new: dict[str, list[New]] = {}
    for tensor in tensors:
        if quantize and is_quantized(tensor.name, tensor.shape):
            scale = New(tensor.name + SCALE, scale_shape(tensor.shape), "float32")
            new[tensor.name] = [New(tensor.name, tensor.shape, DTYPE), scale]
        else:
            new[tensor.name] = [New(tensor.name, tensor.shape, tensor.dtype)]
    if checkpoint.manifest is None:
        groups = hf_files.split([one for own in new.values() for one in own])
        return {file: [New(t.name, t.shape, t.dtype) for t in group] for file, group in groups.items()}
    files: dict[str, list[New]] = {}
    for name, entry in checkpoint.manifest.tensors.items():
        files.setdefault(entry.file, []).extend(new[name])
    return files


def _headers(directory: Path, files: Mapping[str, Sequence[New]]) -> dict[str, Stored]:
    """Write the headers, unless an earlier process did."""
    done = directory.parent / "headers.done"
    if not done.exists():
        hf_files.write_headers(directory, files)
        done.touch()
    return hf_files.read_checkpoint(directory)


def write_unit(unit: Unit) -> None:
    """Write the tensors of a unit into the files that stand ready, then its record. Runs in a worker."""
    hashes: dict[str, str] = {}
    opened: dict[str, int] = {}
    try:
        with Reader(unit.weights) as reader:
            for tensor in unit.tensors:
                place = unit.places[tensor.name]
                if place.file not in opened:
                    opened[place.file] = os.open(unit.partial / WHOLE / place.file, os.O_WRONLY)
                hashes[tensor.name] = _write(reader, tensor, unit.places, opened[place.file])
        for fd in opened.values():
            # Begins to write to the disk, and drops what is there: memory that is warm serves the next unit.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        write_record(unit.record, hashes)
    except OSError as error:
        raise BackendError(
            f"Writing below {unit.partial} failed: {error}. Free space there; the same command then goes on from here."
        ) from error
    finally:
        for fd in opened.values():
            os.close(fd)


def _write(reader: Reader, tensor: Wanted, places: Mapping[str, Stored], fd: int) -> str:
    """Returns: the hash of the tensor as the checkpoint holds it."""
    digest = xxhash.xxh3_128()
    place, scale = places[tensor.name], places.get(tensor.name + SCALE)
    for row, window in reader.windows(tensor, multiple=BLOCK if scale else 1):
        digest.update(memoryview(window).cast("B"))
        if scale is None:
            hf_files.write_at(fd, memoryview(window).cast("B"), place.at + row * window.shape[1])
            continue
        data, factors = fp8.quantize(window, dtype=tensor.dtype, columns=tensor.columns)
        hf_files.write_at(fd, data, place.at + row * tensor.columns)
        hf_files.write_at(fd, factors, scale.at + row // BLOCK * scale.shape[1] * 4)
    return digest.hexdigest()


def _to_disk(directory: Path) -> None:
    """Once for each file: while several processes write to one, each wait for the disk would be for all of them."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            raise BackendError(f"Writing {path} failed: {error}. Free space there.") from error
        finally:
            os.close(fd)


def _companions(checkpoint: Checkpoint, directory: Path, tensors: Sequence[Wanted], *, quantize: bool) -> None:
    if checkpoint.manifest is None:
        hf_files.copy_companions(checkpoint.model, directory, dtype=tensors[0].dtype)
    else:
        for path in hf_files.companions(checkpoint.model):
            shutil.copyfile(path, directory / path.name)
    if quantize:
        config = hf_files.read_hf_config(directory)
        (directory / "config.json").write_text(json.dumps(fp8.config_of(config), indent=2) + "\n")
