"""A queue without Slurm, and sweeps that are started in this process."""

import json
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.main import read_config
from megatron_rl.sweeps.command import run_sweep

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "examples" / "digits.jsonl"
COMMON = ("-m", "experiment=cpu_digits", "name=tried", f"data.path={PROMPTS}")


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., int]:
    """Run a sweep of the demo below tmp_path/runs, and return its exit code."""
    return lambda *arguments: run_sweep([*COMMON, f"runs_dir={tmp_path}/runs", *arguments], read=read_config)


@pytest.fixture
def optuna() -> None:
    """Where Hydra finds Optuna's sweeper."""
    assert any((path / "hydra_optuna_sweeper").is_dir() for path in _places()), "Not installed: make optuna"


def _places() -> Iterator[Path]:
    for path in (*sys.path, Path(__file__).parents[2] / "build" / "optuna"):
        yield Path(path) / "hydra_plugins"


@dataclass(frozen=True, slots=True)
class Queue:
    """What tests/sweeps/slurm.py has been given."""

    path: Path

    def jobs(self) -> list[dict[str, Any]]:
        """In the order of their submission."""
        return [json.loads(path.read_text()) for path in sorted(self.path.glob("*.job"))]

    def script(self) -> Path:
        """A file that stands for the job script."""
        return self.path / "script.sh"


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """sbatch and squeue on PATH, with an empty queue behind them."""
    found = Queue(tmp_path / "queue")
    found.path.mkdir()
    found.script().touch()
    words = shlex.join([sys.executable, "-IS", str(Path(__file__).with_name("slurm.py"))])
    for name in ("sbatch", "squeue"):
        program = found.path / name
        program.write_text(f'#!/bin/sh\nexec {words} {name} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("QUEUE", str(found.path))
    monkeypatch.setenv("PATH", f"{found.path}{os.pathsep}{os.environ['PATH']}")
    return found
