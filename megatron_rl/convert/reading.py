"""HF tensors out of a torch_dist checkpoint, whoever saved it on whatever ranks: a few rows at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_rl.convert.placement import Spot, find_placement
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formats import manifest, torch_dist
from megatron_rl.formats.hf_files import read_hf_config
from megatron_rl.formats.manifest import Manifest
from megatron_rl.formats.torch_dist import Contents, Item
from megatron_rl.layouts.boxes import NBYTES
from megatron_rl.layouts.compile import hf_layouts
from megatron_rl.models import load_table
from megatron_rl.models.family import HfConfig

WINDOW_BYTES = 1 << 20
"""Read at once: what stays in a cache until it is written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A torch_dist checkpoint and what belongs to it."""

    weights: Path
    model: Path
    """Where config.json and tokenizer lie."""
    manifest: Manifest | None
    """None for one that a training run saved."""
    config: HfConfig


@dataclass(frozen=True, slots=True)
class Segment:
    """A rectangle of an HF tensor, and where it begins in a stored item."""

    item: Item
    item_offset: tuple[int, ...]
    """In the HF tensor's dims."""
    hf_offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An HF tensor and the segments that make it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * NBYTES[self.dtype]


def find_checkpoint(directory: Path) -> Checkpoint:
    """What `import` wrote, or a step of a run: runs/NAME/checkpoints/step_NNNNNN.

    Raises: ConfigError or DataError that says what it lacks.
    """
    weights = directory if torch_dist.is_torch_dist(directory) else directory / "weights"
    if not torch_dist.is_torch_dist(weights):
        raise ConfigError(
            f"{directory} holds no weights in torch_dist format ({torch_dist.METADATA} is not there). Name what "
            "`import` wrote, or runs/NAME/checkpoints/step_NNNNNN of a run."
        )
    model = weights if (weights / "config.json").exists() else _model_of_run(weights)
    return Checkpoint(weights, model, manifest.read(weights), read_hf_config(model))


def _model_of_run(weights: Path) -> Path:
    run = weights.absolute().parents[2]
    settings = run / "config.yaml"
    named = yaml.safe_load(settings.read_text())["model"]["path"] if settings.exists() else None
    model = Path(named) if named else run / "model"
    if not (model / "config.json").exists():
        raise ConfigError(
            f"{weights} has no config.json, and neither has {model}, where its run would have started from: nothing "
            "says what the tensors are. Copy config.json and the tokenizer of the model beside its .metadata."
        )
    return model


def wanted(checkpoint: Checkpoint) -> list[Wanted]:
    """Every HF tensor to write, in the order of the import or of the table.

    Raises: DataError when the checkpoint lacks one, or holds it in a narrower dtype than the model keeps it in.
    """
    contents = torch_dist.read_contents(checkpoint.weights)
    placement = find_placement(checkpoint.config)
    index = {key: _Index(items) for key, items in contents.items.items()}
    known = checkpoint.manifest
    if lacking := [n for n, spots in placement.spots.items() if any(spot.key not in index for spot in spots)]:
        raise DataError(
            f"{checkpoint.weights} lacks {len(lacking)} of {len(placement.spots)} tensors of the model: "
            f"{', '.join(lacking[:10])}. It was saved from another model than {checkpoint.model / 'config.json'} says."
        )
    table = load_table(checkpoint.config)
    layouts = hf_layouts(table, dtype="")
    if known is None:
        _refuse_cast(checkpoint, contents, {t.name: (placement.spots[t.name][0].key, t.dtype) for t in layouts})
        dtypes = {name: contents.dtypes[spots[0].key] for name, spots in placement.spots.items()}
        has_weights = torch_dist.is_torch_dist(checkpoint.model) or any(checkpoint.model.glob("*.safetensors"))
        copies = manifest.stored_aliases(checkpoint.model, table) if has_weights else []
        names = [*((layout.name, layout.name) for layout in layouts), *((n, table.aliases[n]) for n in copies)]
    else:
        dtypes = {name: entry.dtype for name, entry in known.tensors.items()}
        names = [(name, known.aliases.get(name, name)) for name in known.tensors]
    shapes = {layout.name: layout.shape for layout in layouts}
    out = []
    for name, own in names:
        segments = tuple(s for spot in placement.spots[own] for s in index[spot.key].segments(spot))
        tensor = Wanted(name, dtypes[own], shapes[own], segments)
        if (found := sum(prod(s.shape) for s in segments)) != prod(tensor.shape):
            raise DataError(
                f"{checkpoint.weights} holds {found} of the {prod(tensor.shape)} elements of {own}: it was saved from "
                f"a model of another size than {checkpoint.model / 'config.json'} says. Use the model's own."
            )
        out.append(tensor)
    return out


def _refuse_cast(checkpoint: Checkpoint, contents: Contents, pinned: Mapping[str, tuple[str, str]]) -> None:
    for name, (key, dtype) in pinned.items():
        if dtype and contents.dtypes[key] != dtype:
            raise DataError(
                f"{name} is {contents.dtypes[key]} in {checkpoint.weights}, and the model keeps it in {dtype}: it was "
                "cast before it was saved, and rounded it sends tokens to other experts. Save it again without casts."
            )


class _Index:
    """Finds the items of one checkpoint tensor that share elements with a spot."""

    def __init__(self, items: Sequence[Item]):
        self._at: dict[tuple[int, ...], list[Item]] = {}
        for item in items:
            leading = [range(o, o + n) for o, n in zip(item.offset[:-2], item.shape[:-2], strict=True)]
            for place in product(*leading):
                self._at.setdefault(place, []).append(item)

    def segments(self, spot: Spot) -> Iterator[Segment]:
        """Of one-layer, one-expert items only, which is how megatron saves."""
        lead = len(spot.offset) - len(spot.shape)
        for item in self._at.get(spot.offset[:-2], ()):
            low = tuple(map(max, spot.offset, item.offset))
            ends = zip(spot.offset, spot.full_shape, item.offset, item.shape, strict=True)
            shape = tuple(min(a + n, b + m) - start for start, (a, n, b, m) in zip(low, ends, strict=True))
            if min(shape) <= 0:
                continue
            assert item.shape[:lead] == (1,) * lead, item
            item_offset = tuple(e - b for e, b in zip(low[lead:], item.offset[lead:], strict=True))
            moved = zip(spot.hf_offset, low[lead:], spot.offset[lead:], strict=True)
            yield Segment(item, item_offset, tuple(o + e - s for o, e, s in moved), shape[lead:])


class Reader:
    """Reads windows of rows. Files are opened once; use as a context manager."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._data: dict[tuple[str, int], int] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def windows(self, tensor: Wanted, *, multiple: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, uint8 [rows, bytes of a row]) in order, `multiple` rows or a multiple of them but at the end.

        The next step overwrites the window: new memory for each would cost as much as reading it.
        """
        itemsize = NBYTES[tensor.dtype]
        row_bytes = tensor.columns * itemsize
        step = max(WINDOW_BYTES // (row_bytes * multiple), 1) * multiple
        buffer = np.empty((min(step, tensor.shape[0]), row_bytes), np.uint8)
        for first in range(0, tensor.shape[0], step):
            window = buffer[: tensor.shape[0] - first]
            for segment in tensor.segments:
                self._fill(window, first, segment, itemsize)
            yield first, window

    def _fill(self, window: np.ndarray, first: int, segment: Segment, itemsize: int) -> None:
        """The rows that window and segment share."""
        start = max(segment.hf_offset[0], first)
        rows = min(segment.hf_offset[0] + segment.shape[0], first + len(window)) - start
        if rows <= 0:
            return
        item = segment.item
        lead = len(item.shape) - len(segment.shape)
        stored = prod(item.shape[lead + 1 :]) * itemsize  # bytes of a row of the item
        # Rows of one dim have one element; of two, the segment may hold some of their columns.
        column = segment.item_offset[1] * itemsize if len(segment.shape) == 2 else 0
        target = segment.hf_offset[1] * itemsize if len(segment.shape) == 2 else 0
        width = prod(segment.shape[1:]) * itemsize
        file = self._open(item.file)
        file.seek(self._begin(file, item, itemsize) + (segment.item_offset[0] + start - segment.hf_offset[0]) * stored)
        part = window[start - first : start - first + rows]
        if width == stored == window.shape[1]:
            _read(file, part, item)
            return
        block = np.empty((rows, stored), np.uint8)
        _read(file, block, item)
        part[:, target : target + width] = block[:, column : column + width]

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                file = open(self.directory / name, "rb", buffering=0)  # noqa: SIM115 # closed with the stack
            except OSError as error:
                raise DataError(
                    f"{self.directory / name} cannot be opened ({error.strerror}): a part of the checkpoint is "
                    "missing. Copy it again, or import again."
                ) from error
            self._files[name] = self._stack.enter_context(file)
        return self._files[name]

    def _begin(self, file: Any, item: Item, itemsize: int) -> int:
        key = (item.file, item.at)
        if key not in self._data:
            self._data[key] = torch_dist.data_of(file, item, itemsize=itemsize)
        return self._data[key]


def _read(file: Any, into: np.ndarray, item: Item) -> None:
    view = memoryview(into).cast("B")
    while view:
        count = file.readinto(view)
        if not count:
            raise DataError(f"{item.file} ends before {item.key} does: it was cut. Copy it again, or import again.")
        view = view[count:]
