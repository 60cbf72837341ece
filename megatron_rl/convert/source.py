"""What an import reads: an HF checkpoint whose config and tensors go together, or a refusal that says why not."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.convert import fp8
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formats.hf_files import Stored, read_checkpoint, read_hf_config
from megatron_rl.layouts.boxes import DTYPE_BYTES
from megatron_rl.layouts.compile import hf_layouts
from megatron_rl.layouts.fp8 import DTYPE, SCALE
from megatron_rl.models import load_table
from megatron_rl.models.family import HfConfig

DERIVED = "rotary_emb.inv_freq"
"""Buffers that older transformers saved; everyone computes them from config.json."""
SHOWN = 10
BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that can be imported."""

    directory: Path
    config: HfConfig
    """Without quantization."""
    on_disk: Mapping[str, Stored]
    """What an export will write again, in the order of files and bytes; scales left out."""
    scales: Mapping[str, Stored]
    """Of the tensors that are block-scaled FP8."""
    aliases: Mapping[str, str]
    """Tensors on disk that are copies, equal byte for byte, with what they copy."""
    derived: tuple[str, ...]
    """Tensors left out."""

    @property
    def tensors(self) -> dict[str, Stored]:
        """What the checkpoint will hold: no copies."""
        return {name: tensor for name, tensor in self.on_disk.items() if name not in self.aliases}

    def dtype(self, name: str) -> str:
        """Of a tensor as the checkpoint will hold it."""
        return "bfloat16" if name in self.scales else self.on_disk[name].dtype


def read_source(directory: Path, *, report: Path) -> Source:
    """Raises: ConfigError, DataError for everything that would be wrong or lost; long lists go to `report`."""
    raw = read_hf_config(directory)
    config = fp8.without_quantization(raw)
    check_architecture(config)
    table = load_table(config)
    # "" stands for whatever dtype the model runs in: what has another is pinned by the table.
    expected = {layout.name: layout for layout in hf_layouts(table, dtype="")}
    stored = read_checkpoint(directory)
    scales = {
        name: stored[name + SCALE]
        for name in expected
        if name in stored and stored[name].dtype == DTYPE and name + SCALE in stored
    }
    derived = tuple(name for name in stored if name.endswith(DERIVED))
    aliases = {name: table.aliases[name] for name in stored if name in table.aliases}
    known = {*expected, *aliases, *derived, *(scale.name for scale in scales.values())}
    missing, extra = [n for n in expected if n not in stored], [n for n in stored if n not in known]
    if missing or extra:
        in_model = {layout.name for layout in hf_layouts(table, dtype="", mtp=False)}
        mend = "Use the config.json that belongs to the weights, and all their files."
        if not extra and in_model.isdisjoint(missing):
            mend = (
                "All of them are of multi-token prediction layers, which transformers does not save: then set "
                "num_nextn_predict_layers to 0 in config.json."
            )
        lines = [f"missing: {name}" for name in missing] + [f"extra: {name}" for name in extra]
        raise DataError(
            f"{directory} lacks {len(missing)} tensors that config.json promises and has {len(extra)} that the model "
            f"does not: {_listed(lines, report)}. {mend}"
        )
    tensors = {name: stored[name] for name in stored if name in expected}
    wrong = [
        f"{name} is {list(t.shape)}, config.json makes it {list(expected[name].shape)}"
        for name, t in tensors.items()
        if t.shape != expected[name].shape
    ]
    if wrong:
        raise DataError(
            f"{directory}: config.json and {len(wrong)} tensors disagree about shapes: {_listed(wrong, report)}. Use "
            "the config.json that belongs to the weights."
        )
    pinned = {name: layout.dtype for name, layout in expected.items() if layout.dtype}
    if wrong := [*_wrong_dtypes(tensors, scales, pinned, quantized=raw is not config)]:
        raise DataError(f"{directory}: {len(wrong)} tensors cannot be taken over: {_listed(wrong, report)}")
    _check_aliases(directory, stored, aliases)
    on_disk = {name: stored[name] for name in stored if name in tensors or name in aliases}
    return Source(directory, config, on_disk, scales, aliases, derived)


def _wrong_dtypes(
    tensors: Mapping[str, Stored], scales: Mapping[str, Stored], pinned: Mapping[str, str], *, quantized: bool
) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.dtype == DTYPE and name in scales and quantized:
            if problem := fp8.wrong_scale(tensor, scales[name]):
                yield problem
        elif tensor.dtype == DTYPE:
            lack = "no scale" if name not in scales else "a scale, and config.json says nothing of FP8"
            yield (
                f"{name} is FP8 with {lack}: its values cannot be known. Take {name}{SCALE} and "
                "quantization_config from the original checkpoint."
            )
        elif tensor.dtype not in DTYPE_BYTES:
            yield (
                f"{name} has dtype {tensor.dtype}, which is not supported. Save it as one of {', '.join(DTYPE_BYTES)}."
            )
        elif name in pinned and tensor.dtype != pinned[name]:
            yield (
                f"{name} is {tensor.dtype}, and the model keeps it in {pinned[name]}: rounded, it sends tokens to "
                f"other experts, and the cast has lost what it was. Take it in {pinned[name]} from the original "
                f"checkpoint, or, where that has no other, save it as {pinned[name]} yourself."
            )


def _check_aliases(directory: Path, stored: Mapping[str, Stored], aliases: Mapping[str, str]) -> None:
    for name, original in aliases.items():
        a, b = stored[name], stored[original]
        if (a.dtype, a.shape) != (b.dtype, b.shape) or (at := first_difference(directory, a, directory, b)) is not None:
            where = "" if (a.dtype, a.shape) != (b.dtype, b.shape) else f", first in byte {at}"
            raise DataError(
                f"{name} in {directory} differs from {original}{where}, and the model uses one tensor for both: one of "
                "the two would be lost. Make them equal, or use the original checkpoint."
            )


def first_difference(directory: Path, a: Stored, other: Path, b: Stored) -> int | None:
    """The first byte, counted from the tensor's own, in which two tensors of a size differ."""
    with open(directory / a.file, "rb") as f, open(other / b.file, "rb") as g:
        f.seek(a.at)
        g.seek(b.at)
        for start in range(0, a.nbytes, BLOCK_BYTES):
            count = min(BLOCK_BYTES, a.nbytes - start)
            x, y = f.read(count), g.read(count)
            if x != y:
                return start + next(i for i in range(count) if x[i] != y[i])
    return None


def fingerprint(source: Source, *, unit_bytes: int) -> dict[str, Any]:
    """Equal only for the same files cut into the same units."""
    files = sorted({t.file for t in [*source.on_disk.values(), *source.scales.values()]})
    stats = {name: os.stat(source.directory / name) for name in [*files, "config.json"]}
    return {
        "source": os.path.abspath(source.directory),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "unit_bytes": unit_bytes,
    }


def _listed(lines: Iterable[str], report: Path) -> str:
    lines = list(lines)
    if len(lines) <= SHOWN:
        return "; ".join(lines)
    try:
        report.write_text("\n".join(lines) + "\n")
    except OSError:  # a checkpoint that is only for reading
        return "; ".join(lines)
    return "; ".join(lines[:SHOWN]) + f"; and {len(lines) - SHOWN} more, all of them listed in {report}"


def write_config(source: Source, directory: Path) -> None:
    """config.json of what is written: the source's own, or, where it says FP8, the one of dequantised weights."""
    path = directory / "config.json"
    if source.config != read_hf_config(source.directory):
        dtype = {"dtype": "bfloat16"} if source.scales else {}  # else they had been dequantised before
        path.write_text(json.dumps({**source.config, **dtype}, indent=2) + "\n")
    else:
        path.write_bytes((source.directory / "config.json").read_bytes())


def check_architecture(config: HfConfig) -> None:
    """Raises: ConfigError when config.json does not name what it describes."""
    if not (isinstance(names := config.get("architectures"), list) and names):
        raise ConfigError(
            "config.json names no architecture: nothing says how its tensors are to be read. Add "
            '"architectures": ["..."] as in the original checkpoint.'
        )
