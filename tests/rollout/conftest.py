"""Servers that the live tests of this directory share: starting one takes tens of seconds."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.rollout.server import Server
from tests.rollout.servers import checkpoint, running
from tests.tiny import GRID


@dataclass(frozen=True, slots=True)
class Engines:
    """Servers of one family's tiny model in float32, by tensor-parallel size, and what they started from."""

    family: str
    path: Path
    """The checkpoint they have loaded from disk."""
    other: Path
    """Another checkpoint of the same config."""
    servers: dict[int, Server]


@pytest.fixture(scope="package", params=GRID)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Both servers of one family; tests leave them with the weights that they loaded from `path`."""
    directory = tmp_path_factory.mktemp("engines")
    path = checkpoint(directory, request.param, dtype="float32", seed=1)
    other = checkpoint(directory, request.param, dtype="float32", seed=2)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starts = {
            tp: pool.submit(stack.enter_context, running(path, name=f"engine-tp{tp}", tp=tp, dtype="float32"))
            for tp in (1, 2)
        }
        yield Engines(request.param, path, other, {tp: start.result() for tp, start in starts.items()})
