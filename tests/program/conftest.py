"""A model, a data set and two finished runs that the tests share, and copies of them as if they had been cut short."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.models.random_checkpoint import write_random_checkpoint
from tests.program.program import DONE, Ended, finish
from tests.tiny import TINY

CHARACTERS = "0123456789="
STEPS, MIDDLE = 6, 3
"""Of a run, and the step of its first checkpoint after the warm start's."""


@dataclass(frozen=True, slots=True)
class World:
    """Where things lie."""

    path: Path
    model: Path
    """As a Hugging Face checkpoint."""
    converted: Path
    """The same, as tools/convert makes of it."""
    prompts: Path

    @property
    def runs(self) -> Path:
        """The run directories."""
        return self.path / "runs"

    def output(self, name: str) -> Path:
        """A new file for what a process prints."""
        return self.path / f"{name}-{len(list(self.path.glob('*.out')))}.out"

    def arguments(self, name: str, **changes: object) -> list[str]:
        """A command line of a run called `name`; keyword "sft__lr" is the key sft.lr."""
        settings = {
            "runs_dir": self.runs, "model__path": self.converted, "data__path": self.prompts,
            "steps": STEPS, "prompts_per_step": 8, "checkpoint__every": MIDDLE,
            "data__source": "jsonl", "data__held_out": 8, "reward__name": "exact",
            "sampling__max_tokens": 3, "sampling__samples_per_prompt": 4,
            "algorithm__lr": 1e-3, "algorithm__kl_coef": 0.01,
            "sft__steps": 30, "sft__lr": 3e-3, "sft__prompts_per_step": 8,
            "trainer__world_size": 2, "parallel__ep": 2, "trainer__dtype": "float32",
            "trainer__tokens_per_micro_batch": 128,
            "rollout__dtype": "float32", "rollout__max_total_tokens": 2048,
        }  # fmt: skip
        settings |= {"name": name, **changes}
        return ["model=hf", *(f"{key.replace('__', '.')}={value}" for key, value in settings.items())]

    def replay_arguments(self, name: str, samples: Path, **changes: object) -> list[str]:
        """As `arguments`, training on recorded samples, from the Hugging Face checkpoint."""
        settings = {"mode": "train_only", "samples": samples, "model__path": self.model}
        return self.arguments(name, **{**settings, **changes})

    def cut(self, original: Path, name: str, *, runs: Path | None = None) -> Path:
        """A copy of a finished run as a kill between step MIDDLE and the end would have left it."""
        copy = (runs or self.runs) / name
        shutil.copytree(original, copy, ignore=shutil.ignore_patterns("hf", f"step_{STEPS:06d}", "tensorboard"))
        return copy


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("program")
    model = path / "model"
    hf = {**TINY["deepseek_v3"], "num_hidden_layers": 2, "dtype": "float32"}
    write_random_checkpoint(model, hf, characters=CHARACTERS, seed=1)
    converted = path / "converted"
    command = [sys.executable, Path(__file__).parents[2] / "tools/convert"]
    subprocess.run([*command, "import", "--hf", model, "--out", converted], check=True, capture_output=True)
    prompts = path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{i:02d}=", "answer": str(i % 10)}) for i in range(100)]
    prompts.write_text("\n".join(lines) + "\n")
    (path / "runs").mkdir()
    return World(path, model, converted, prompts)


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that went through."""

    path: Path
    ended: Ended


@pytest.fixture(scope="package")
def trained(world: World) -> Finished:
    """mode=train, uninterrupted: 2 Megatron ranks, 1 SGLang server."""
    ended = finish(world.arguments("trained"), world.output("trained"))
    assert ended.code == DONE, ended.text
    return Finished(world.runs / "trained", ended)


@pytest.fixture(scope="package")
def replayed(world: World, trained: Finished) -> Finished:
    """mode=train_only, uninterrupted, on the samples of `trained`."""
    ended = finish(world.replay_arguments("replayed", trained.path / "samples.jsonl"), world.output("replayed"))
    assert ended.code == DONE, ended.text
    return Finished(world.runs / "replayed", ended)


@pytest.fixture(scope="package")
def ends_as(world: World) -> Callable[..., None]:
    """Run with changed settings, and assert its message and exit code."""

    def check(pattern: str, code: int, name: str, **changes: object) -> None:
        finish(world.arguments(name, **changes), world.output(name)).said(pattern, code=code)

    return check
