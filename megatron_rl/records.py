"""JSON-lines files that a kill cannot spoil: a record is appended whole, and a torn last line is never read."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.errors import BackendError

Record = dict[str, float | None]


def append_record(path: Path, record: Mapping[str, float]) -> None:
    """Append one line in one write; numbers that JSON has no word for (NaN, infinity) become null.

    Raises: BackendError when the disk refuses; what was there before stays.
    """
    values = {key: value if math.isfinite(value) else None for key, value in record.items()}
    line = (json.dumps(values, allow_nan=False) + "\n").encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            written = os.write(descriptor, line)
            if written < len(line):  # a full disk takes what still fits
                os.ftruncate(descriptor, size)
                raise BackendError(f"{path} could not take {len(line)} bytes: the disk is full. {_MEND}")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BackendError(f"{path} cannot be written ({error.strerror}). {_MEND}") from error


_MEND = "Free space there and start the same command again: it resumes."


def read_records(path: Path) -> list[Record]:
    """Every whole line; [] where there is no file. What follows the last line end was cut by a kill and is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def drop_records(path: Path, *, from_step: int) -> list[Record]:
    """Remove the records of `from_step` and later, and a torn last line. Returns those that stay."""
    records = [r for r in read_records(path) if (r["step"] or 0) < from_step]
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text("".join(json.dumps(r) + "\n" for r in records))
        os.replace(partial, path)
    except OSError as error:
        raise BackendError(f"{path} cannot be written ({error.strerror}). {_MEND}") from error
    return records
