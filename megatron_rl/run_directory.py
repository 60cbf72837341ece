"""runs/<name>: made once, owned by one process at a time, and continued only by a config that means the same run."""

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from megatron_rl.checkpoint import complete
from megatron_rl.config import Config, to_yaml
from megatron_rl.errors import BackendError, ConfigError

FIXED = ("model", "data", "seed", "mode", "sft", "samples")
"""Sections that say which run this is: continuing it with others would be another experiment under its name."""


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

    def __enter__(self) -> "RunDirectory":
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"The run directory {self.path} cannot be made: {error}. Choose another runs_dir."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"Another process is running in {self.path}: two would overwrite each other. Choose another name=..."
            ) from error
        self._refuse_another_run()
        self._write_config()
        self._handler = logging.FileHandler(self.logs / "driver.log")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(self._handler)
        logging.getLogger("megatron_rl").setLevel(logging.INFO)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            logging.getLogger(__name__).error("the run ended early", exc_info=(type(error), error, trace))
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()
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
        before, now = yaml.safe_load(saved.read_text()), yaml.safe_load(to_yaml(self.config))
        changed = [
            f"{key}: {old!r} -> {new!r}"
            for section in FIXED
            if (section, self.config.mode) != ("sft", "sft")  # there it is what `algorithm` is elsewhere
            for key, old, new in _differences(section, before.get(section), now[section])
        ]
        if changed:
            raise ConfigError(
                f"{self.path} holds checkpoints of another run: {'; '.join(changed)}. "
                "Choose another name=..., or remove the directory."
            )


@contextmanager
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
