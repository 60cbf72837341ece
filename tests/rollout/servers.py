"""Starts real servers on tiny models for the live tests, and asks them things."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from megatron_rl.models.random_checkpoint import write_random_checkpoint
from megatron_rl.rollout.options import ServerSettings
from megatron_rl.rollout.server import Request, Server
from tests.tiny import CHARACTERS, TINY, norm_latents_as_configured

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


def assert_greedy_text_is_that_of_transformers(server: Server, path: Path) -> None:
    """Its tokens and their log-probabilities, of a server that has loaded the checkpoint at `path`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    norm_latents_as_configured(model)
    # The longer prompts reach beyond the positions that the scaled models of tests/tiny.py know without scaling.
    prompts = tuple(tuple(3 + (7 * i + 11 * j) % 50 for j in range(length)) for i, length in enumerate((4, 40, 90)))

    rollouts, _ = server.generate(Request(prompts, 1, (0,) * len(prompts), max_tokens=16, temperature=0.0))

    lengths = []
    for row, prompt in enumerate(prompts):
        tokens, logprobs, length = rollouts.row(row)
        with torch.no_grad():
            wanted = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0]
            logits = model(wanted[None]).logits[0]
        assert tokens.tolist() == wanted.tolist()
        log_softmax = logits.log_softmax(-1)[torch.arange(length - 1, len(wanted) - 1), wanted[length:]]
        np.testing.assert_allclose(logprobs[length:], log_softmax, rtol=0, atol=1e-5)  # float32 through four layers
        lengths.append(len(wanted) - length)
    assert max(lengths) == 16


def schedulers(group: int) -> list[int]:
    """Pids of the ranks of the server that leads this process group."""
    return titled(group, "sglang::scheduler")


def titled(group: int, title: str) -> list[int]:
    """Pids of a process group's processes whose titles begin so, in the order of these."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        with contextlib.suppress(ProcessLookupError):
            if line.startswith(title) and os.getpgid(process.pid) == group:
                found[line] = process.pid
    return [found[line] for line in sorted(found)]


def greedy_text(server: Server) -> list[int]:
    """Tokens of three prompts and their most likely continuations."""
    prompts = ((5, 6, 7, 8), (9, 10, 11, 12, 13), (40, 30, 20))
    rollouts, _ = server.generate(Request(prompts, 1, (0, 0, 0), max_tokens=16, temperature=0.0))
    return rollouts.tokens.tolist()


def state_of(server: Server) -> tuple[list[dict[str, str]], list[int]]:
    """Checksum of every parameter of every rank, and greedy text, which sees MLA's derived matrices too."""
    return server.checksums(), greedy_text(server)
