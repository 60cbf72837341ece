"""Starts real servers on tiny models for the live tests, and asks them things."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.models.random_checkpoint import write_random_checkpoint
from megatron_rl.rollout.options import ServerSettings
from megatron_rl.rollout.server import Request, Server
from tests.tiny import CHARACTERS, TINY

START_TIMEOUT_S = 500.0
"""20 s on an idle machine; test machines may be busy."""
END = 1
"""The tokenizer's end token."""


def checkpoint(directory: Path, family: str, *, dtype: str, seed: int) -> Path:
    """A tiny random checkpoint below `directory`, in which every tensor is random."""
    path = directory / f"{family}-{dtype}-{seed}"
    write_random_checkpoint(path, {**TINY[family], "dtype": dtype}, characters=CHARACTERS, seed=seed, jitter=0.1)
    return path


def hf_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint."""
    return json.loads((path / "config.json").read_text())


@contextlib.contextmanager
def running(path: Path, **settings: Any) -> Iterator[Server]:
    """A server of the checkpoint at `path`, its log beside it."""
    name = settings.pop("name", f"engine-{path.name}")
    values = {"model_path": str(path), "log_path": str(path.parent / f"{name}.log"), "device": "cpu"}
    server = Server(ServerSettings(**{"name": name, **values, "start_timeout_s": START_TIMEOUT_S, **settings}))
    try:
        server.start()
        yield server
    finally:
        server.stop()


def greedy_text(server: Server) -> list[int]:
    """Tokens of three prompts and their most likely continuations."""
    prompts = ((5, 6, 7, 8), (9, 10, 11, 12, 13), (40, 30, 20))
    rollouts, _ = server.generate(Request(prompts, 1, (0, 0, 0), max_tokens=16, temperature=0.0))
    return rollouts.tokens.tolist()
