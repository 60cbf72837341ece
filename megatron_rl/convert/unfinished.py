"""OUT.partial: what a conversion has written so far, kept for the same command when the process dies."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_rl.errors import BackendError, ConfigError, DataError

WHOLE = "whole"
"""The directory in it that becomes OUT."""
_RECORD = "conversion.json"


def partial_of(out: Path) -> Path:
    """Beside `out`, on the same disk."""
    return out.with_name(out.name + ".partial")


def refuse_full(out: Path) -> None:
    """Raises: ConfigError unless `out` can be made."""
    if out.is_symlink() or out.is_mount():
        raise ConfigError(
            f"{out} is a link or where a disk is mounted: what is whole appears by one rename, which cannot take the "
            "place of that. Choose a directory below it as --out."
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: what is there would be lost. Choose another --out.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out.absolute().parent} is no directory. Make it, or choose another --out.")


@contextlib.contextmanager
def own(partial: Path, now: Mapping[str, object]) -> Iterator[None]:
    """Hold the unfinished directory, which is new or was left by a process that did the same.

    `now` says what is done: "source" (a path), "files" ({name: [size, time]}), and whatever else has to be equal.
    """
    if partial.exists() and not (partial / _RECORD).exists() and any(partial.iterdir()):
        raise ConfigError(
            f"{partial} is in the way, and nothing that this command left. Remove it, or choose another --out."
        )
    partial.mkdir(exist_ok=True)
    with open(partial / _RECORD, "a+") as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another process is writing {partial}. Wait for it.") from error
        record.seek(0)
        if text := record.read():
            _refuse_another(partial, json.loads(text), json.loads(json.dumps(now)))
        else:
            json.dump(now, record)
            record.flush()
        (partial / WHOLE).mkdir(exist_ok=True)
        for path in partial.glob("*.tmp"):
            path.unlink()
        yield


def _refuse_another(partial: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    if before == now:
        return
    old, new = before["files"], now["files"]
    assert isinstance(old, dict) and isinstance(new, dict), (old, new)
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if before["source"] != now["source"] or not changed:
        raise DataError(
            f"{partial} is what another conversion left, of {before['source']}. Remove it, or choose another --out."
        )
    raise DataError(
        f"{', '.join(changed[:10])} in {now['source']} changed since {partial} was begun: half of the "
        "result would be of other weights. Put the files back, or remove that directory and start anew."
    )


def check_space(nbytes: int, out: Path) -> None:
    """Raises: BackendError unless the disk of `out` has room for so many bytes more, and one in a hundred over."""
    free, need = shutil.disk_usage(out.absolute().parent).free, nbytes + nbytes // 100 + 1_000_000
    if free < need:
        raise BackendError(
            f"{need / 1e9:.2f} GB are needed for {out} and {free / 1e9:.2f} GB are free there. Free "
            f"{(need - free) / 1e9:.2f} GB, or choose another --out."
        )


def write_record(path: Path, content: object) -> None:
    """Write what a whole unit holds, as JSON: the record is there whole, or not at all, even when the machine stops."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
