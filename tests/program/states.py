"""Reads what runs leave on disk, and compares it bit for bit."""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

CHANGES_WITH_THE_MACHINE = re.compile(r"(time|throughput|rss)/|.*_s$")


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock and the machine decide."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not CHANGES_WITH_THE_MACHINE.match(k)} for line in lines]


def samples(run: Path) -> list[dict[str, Any]]:
    """samples.jsonl."""
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def same(a: Any, b: Any, *, where: str = "") -> list[str]:
    """Where two saved states differ; tensors are compared bit for bit, NaN equal to itself."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
        return [] if equal else [f"{where}: tensors differ"]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        missing = [f"{where}.{key}: on one side only" for key in a.keys() ^ b.keys()]
        return missing + [d for key in a.keys() & b.keys() for d in same(a[key], b[key], where=f"{where}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in same(x, y, where=f"{where}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r} and {b!r}"]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def state(checkpoint: Path) -> dict[str, Any]:
    """Everything of a checkpoint: weights, each rank's optimizer, schedule and random state, the driver's part."""
    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(checkpoint / "weights", whole.name)
        weights = torch.load(whole.name, weights_only=False)
    ranks = {path.name: torch.load(path, weights_only=True) for path in sorted(checkpoint.glob("rank-*.pt"))}
    return {"weights": weights, **ranks, "driver": json.loads((checkpoint / "state.json").read_text())}


def differences(a: Path, b: Path, *, step: int) -> list[str]:
    """Where two runs differ: in the checkpoint of `step`, tensor by tensor, and in the exported files, byte by byte."""
    name = f"checkpoints/step_{step:06d}"
    states = same(state(a / name), state(b / name))
    files = [{p.name: p.read_bytes() for p in (run / "hf").iterdir()} for run in (a, b)]
    return states + [
        f"hf/{name}" for name in files[0].keys() | files[1].keys() if files[0].get(name) != files[1].get(name)
    ]
