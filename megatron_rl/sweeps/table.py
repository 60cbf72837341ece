"""How far a sweep is, as a table."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.progress import clock
from megatron_rl.records import Record, read_records
from megatron_rl.sweeps.points import COMPLETED, Point

_HEADER = ("point", "state", "best eval/reward", "step", "time", "path")
_NOTE_LENGTH = 200


def table(points: Sequence[Point]) -> str:
    """A line for each point: the path is its run directory, or its log where it did not end well. Notes stand below."""
    rows = [_HEADER, *map(_row, points)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for i in range(len(points), 0, -1):
        if note := " ".join(points[i - 1].note.split()):
            lines.insert(i + 1, f"    {note[:_NOTE_LENGTH]}")
    return "\n".join(lines)


def best_reward(path: Path) -> tuple[float, int] | None:
    """The highest eval/reward of the run in `path`, and its step; None where nothing was evaluated."""
    return _best(read_records(path / "metrics.jsonl"))


def _best(records: Sequence[Record]) -> tuple[float, int] | None:
    found = [(value, int(r["step"] or 0)) for r in records if (value := r.get("eval/reward")) is not None]
    return max(found, key=lambda one: one[0], default=None)


def _row(point: Point) -> tuple[str, ...]:
    records = read_records(point.path / "metrics.jsonl")
    step = "-" if not records else str(int(records[-1]["step"] or 0))
    seconds = "-" if point.seconds is None else clock(point.seconds)
    ended_badly = point.state != COMPLETED and not point.is_active and point.log.exists()
    return (point.name, point.state, _result(records), step, seconds, _short(point.log if ended_badly else point.path))


def _result(records: Sequence[Record]) -> str:
    if best := _best(records):
        return f"{best[0]:.3f} (step {best[1]})"
    losses = [loss for record in records if (loss := record.get("loss")) is not None]
    return f"loss {losses[-1]:.3g}" if losses else "-"  # mode=sft has no reward


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
