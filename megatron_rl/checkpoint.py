"""What a resumable run is: weights, optimizer, scheduler and RNG (the trainer's own files), data cursor, step.

A checkpoint is written below a name that no reader looks at and renamed when whole: a killed save leaves nothing that
looks like one.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import BackendError, DataError
from megatron_rl.protocols import Trainer

logger = logging.getLogger(__name__)

STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL = ".partial"


class Stopped(BaseException):
    """The run was asked to stop and has saved what can be saved. Not a failure: main.py alone catches it."""


class Stateful(Protocol):
    """Something with a position that has to survive a restart."""

    def state(self) -> dict[str, Any]:
        """JSON-serializable position."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`; refuses one that belongs to other data."""
        ...


class Checkpoints:
    """The checkpoints of one run, below `directory`."""

    def __init__(self, directory: Path, *, trainer: Trainer, prompts: Stateful, steps: int, every: int, keep: int):
        """every: steps between checkpoints, 0 for none. keep: complete ones kept."""
        self.directory, self.trainer, self.prompts = directory, trainer, prompts
        self.steps, self.every, self.keep = steps, every, keep
        self._stop_asked = False

    def stop_soon(self) -> None:
        """The step in work shall be this process's last. Only sets a flag: signal handlers call it."""
        self._stop_asked = True

    def stop_if_asked(self, lost: str) -> None:
        """Where nothing can be saved. Raises: Stopped, which says that `lost` is."""
        if self._stop_asked:
            raise Stopped(f"{lost}. The same command starts again")

    def restore(self) -> int | None:
        """Load the newest complete checkpoint. Returns its step; None when there is no checkpoint."""
        found = complete(self.directory)
        if not found:
            return None
        step, path = found[-1]
        self.prompts.restore(read_state(path)["prompts"])
        try:
            self.trainer.load(path)
        except BackendError as error:
            raise BackendError(
                f"{path} could not be loaded: {error}\nIf its files are damaged, remove that directory: the same "
                "command then resumes from the checkpoint before it, or starts anew where there is none."
            ) from error
        logger.info("resumed from %s: weights, optimizer, scheduler, RNG, data cursor, step %d", path, step)
        return step

    def due(self, step: int) -> bool:
        """Every `every` steps, at the last one, and when a stop was asked for."""
        return self._stop_asked or (self.every > 0 and (step == self.steps or step % self.every == 0))

    def save(self, step: int) -> Path:
        """Write the checkpoint of `step`, drop the oldest beyond `keep` and what killed saves have left.

        Raises: BackendError when the disk refuses; earlier checkpoints are untouched. Stopped when it was asked for and
        steps are left.
        """
        final = self.directory / f"step_{step:06d}"
        partial = final.with_name(final.name + _PARTIAL)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self.trainer.save(partial)
            state = {"step": step, "prompts": self.prompts.state()}
            (partial / STATE).write_text(json.dumps(state, indent=1))
            _to_disk(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(partial, final)
            _sync(self.directory)
        except (OSError, BackendError) as error:
            free_mb = shutil.disk_usage(self.directory.parent).free / 1e6  # the error need not mention the disk
            shutil.rmtree(partial, ignore_errors=True)
            raise BackendError(
                f"The checkpoint of step {step} could not be written below {self.directory}, where {free_mb:.1f} MB "
                f"were free: {str(error).rstrip('.')}. Earlier checkpoints are untouched. Free space there or make it "
                "writable (or lower checkpoint.keep), and start the same command again: it resumes."
            ) from error
        kept = {path for _, path in complete(self.directory)[-self.keep :]}
        for path in self.directory.iterdir():
            if path not in kept and _NAME.fullmatch(path.name.removesuffix(_PARTIAL)):
                _remove(path)
        logger.info("saved %s", final)
        if self._stop_asked and step < self.steps:
            raise Stopped(f"{final} is saved. The same command resumes")
        return final


def complete(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every whole checkpoint below `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), p) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name)) and (p / STATE).is_file()]
    return sorted(found)


def _remove(path: Path) -> None:
    """An old checkpoint, or what a kill left of a save or of this: STATE first, so that the rest never looks whole."""
    try:
        (path / STATE).unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:  # the next save tries again
        logger.warning("%s could not be removed: %s", path, error)


def read_state(path: Path) -> dict[str, Any]:
    """The driver's part of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
    except ValueError as error:
        raise DataError(
            f"{path / STATE} is not JSON ({error}): the checkpoint was changed after it was written. "
            "Remove that directory to resume from the one before."
        ) from error
    return state


def _to_disk(directory: Path) -> None:
    """fsync every file and directory below `directory`: a rename must not outrun its contents."""
    for root, _, files in os.walk(directory):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
