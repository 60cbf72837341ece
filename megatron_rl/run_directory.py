"""runs/<name>: made once, owned by one process at a time, and continued only by a config that means the same run."""

import contextlib
import fcntl
import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import yaml

from megatron_rl.checkpoint import complete
from megatron_rl.config import Config
from megatron_rl.config_loading import to_yaml
from megatron_rl.errors import BackendError, ConfigError, DataError

FIXED = ("model", "data", "seed", "mode", "sft", "samples")
"""Sections that say which run this is: continuing it with others would be another experiment under its name."""
LAYOUT = ("parallel", "trainer.world_size", "trainer.dtype", "trainer.distributed_optimizer")
"""What the optimizer's shards are cut by; trainer/state.py compares the same with what a checkpoint holds."""


ENDING = "ended.json"
"""In a run directory whose last process has ended by itself."""
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Ending:
    """How the last process of a run ended, by its own word."""

    error: str
    """Empty: it did what it was asked for. INTERRUPTED, or the message of the error that ended it."""
    seconds: float


class RunDirectory:
    """The files of one run. Use as a context manager: it holds the directory's lock and writes log/driver.log."""

    def __init__(self, config: Config):
        self.config = config
        self.path = Path(config.runs_dir, config.name).absolute()
        self.logs = self.path / "log"
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples.jsonl"
        self.model = Path(config.model.path).absolute() if config.model.path else self.path / "model"
        self.hf = self.path / "hf"

    def lock(self) -> TextIO:
        """Make the directory, and own it until what is returned is closed. Raises: ConfigError."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"The run directory {self.path} cannot be made: {error}. Choose another runs_dir."
            ) from error

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ConfigError(
                f"Another process is running in {self.path}: two would overwrite each other. Choose another name=..."
            ) from error
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"The file system of {self.path} gives no locks ({error}): two processes could overwrite each other. "
                "Choose a runs_dir on one that does; Lustre does when it is mounted with `flock`."
            ) from error
        return lock

    def __enter__(self) -> "RunDirectory":
        self._lock = self.lock()
        self._refuse_another_run()
        self._write_config()
        (self.path / ENDING).unlink(missing_ok=True)
        self._started_s = time.monotonic()
        logging.raiseExceptions = False  # a log line that a full disk refuses is no news beside our message
        self._handler = self._open_log()
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(self._handler)
        logging.getLogger("megatron_rl").setLevel(logging.INFO)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            logging.getLogger(__name__).error("the run ended early", exc_info=(type(error), error, trace))
        logging.getLogger().removeHandler(self._handler)
        with contextlib.suppress(OSError):  # the lines that a full disk refused
            self._handler.close()
        text = "" if error is None else str(error) or type(error).__name__
        if error is not None and not isinstance(error, Exception):
            text = INTERRUPTED
        ending = Ending(text, time.monotonic() - self._started_s)
        with contextlib.suppress(OSError):  # a disk that refuses has been reported, or harms nothing
            (self.path / ENDING).write_text(json.dumps(asdict(ending)) + "\n")
        self._lock.close()

    def _write_config(self) -> None:
        """All of it or nothing: the next process compares with it."""
        partial = self.path / "config.yaml.partial"
        try:
            partial.write_text(to_yaml(self.config))
            partial.rename(self.path / "config.yaml")
        except OSError as error:
            raise BackendError(
                f"{self.path / 'config.yaml'} cannot be written ({error.strerror}). Free space there and start "
                "the same command again."
            ) from error

    def _open_log(self) -> logging.FileHandler:
        path = self.logs / "driver.log"
        try:
            return logging.FileHandler(path)
        except OSError as error:
            raise BackendError(
                f"{path} cannot be opened ({error.strerror}). Free space there and start the same command again."
            ) from error

    def _refuse_another_run(self) -> None:
        """Nothing that a checkpoint belongs to may change under it, and resume=never wants no results at all."""
        results = [p for p in (self.path / "metrics.jsonl", self.samples, self.checkpoints, self.hf) if p.exists()]
        if results and self.config.resume == "never":
            raise ConfigError(
                f"{results[0]} exists and resume=never: going on would overwrite that run. "
                "Choose another name=..., remove the directory, or set resume=auto."
            )
        saved = self.path / "config.yaml"
        if not saved.exists() or not complete(self.checkpoints):
            return
        before, now = self._read_config(saved), yaml.safe_load(to_yaml(self.config))
        # With mode=sft, `sft` is what `algorithm` is elsewhere.
        fixed = [section for section in FIXED if (section, self.config.mode) != ("sft", "sft")]
        if changed := _changes(fixed, before, now):
            raise ConfigError(
                f"{self.path} holds checkpoints of another run: {changed}. "
                "Choose another name=..., or remove the directory."
            )
        if changed := _changes(LAYOUT, before, now):
            raise ConfigError(
                f"{self.path} holds checkpoints of another layout: {changed}. Their optimizer shards do not fit these "
                "ranks. Resume with the saved values, or start a new run with another name=... from the weights that "
                f"this one exports at its end: model=hf model.path={self.hf}"
            )

    def _read_config(self, saved: Path) -> dict[str, Any]:
        """What `_write_config` wrote. Raises: DataError when something else stands there."""
        try:
            before = yaml.safe_load(saved.read_text())
            problem = "" if isinstance(before, dict) else f"it holds a {type(before).__name__}"
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            before, problem = {}, " ".join(str(error).split())
        if problem:
            raise DataError(
                f"{saved} cannot be read as a run's config ({problem}): it was changed after it was written, and says "
                f"which run the checkpoints beside it belong to. Put it back, or choose another name=..."
            )
        assert isinstance(before, dict), before
        return before


def read_ending(path: Path) -> Ending | None:
    """What the last process in run directory `path` wrote when it ended; None while it runs, or where it was killed."""
    try:
        return Ending(**json.loads((path / ENDING).read_text()))
    except (OSError, ValueError, TypeError):  # none, or one that a full disk cut short
        return None


@contextlib.contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A name that no reader looks at, renamed to `directory` when the block has filled it."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def _differences(key: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for k in sorted(old.keys() | new.keys()) for d in _differences(f"{key}.{k}", old.get(k), new.get(k))]
    return [] if old == new else [(key, old, new)]


def _changes(keys: Sequence[str], before: dict[str, Any], now: dict[str, Any]) -> str:
    """Dotted keys below `keys` whose values differ, with both: "seed: 0 -> 5"; empty when none does."""
    found = []
    for key in keys:
        section, _, name = key.partition(".")
        old, new = before.get(section), now[section]
        if name:
            old, new = (old.get(name) if isinstance(old, dict) else None), new[name]
        found += [f"{k}: {a!r} -> {b!r}" for k, a, b in _differences(key, old, new)]
    return "; ".join(found)
