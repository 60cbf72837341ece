"""Servers that the live tests of this directory share: starting one takes tens of seconds."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.spec import SyncSpec
from megatron_rl.rollout.server import Server
from tests.rollout.servers import checkpoint, hf_config, running, state_of
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
    twin: Server | None = None
    """Another one of size 2."""

    @property
    def named(self) -> dict[str, Server]:
        twin = {"twin": self.twin} if self.twin else {}
        return {**{f"tp{tp}": server for tp, server in self.servers.items()}, **twin}

    def spec(self, trainer: MegatronTopology, *, tp: int = 2, **options: Any) -> SyncSpec:
        """Of pushes into servers of this size."""
        return SyncSpec(hf_config(self.path), trainer, SglangTopology(tp=tp), *["float32"] * 2, **options)

    def from_one_rank(self, **options: Any) -> SyncSpec:
        """Of pushes from a trainer of one rank."""
        mtp = hf_config(self.path).get("num_nextn_predict_layers", 0)
        return self.spec(MegatronTopology(world_size=1, num_layers=4, mtp_layers=mtp), **options)


@pytest.fixture(scope="package", params=GRID)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Both servers of one family; tests leave them with the weights that they loaded from `path`."""
    directory = tmp_path_factory.mktemp("engines")
    path = checkpoint(directory, request.param, dtype="float32", seed=1)
    other = checkpoint(directory, request.param, dtype="float32", seed=2)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starts = {
            name: pool.submit(stack.enter_context, running(path, name=f"engine-{name}", tp=tp, dtype="float32"))
            for name, tp in (("tp1", 1), ("tp2", 2), ("twin", 2))
        }
        one, two, twin = (start.result() for start in starts.values())
        yield Engines(request.param, path, other, {1: one, 2: two}, twin)


@pytest.fixture(scope="package")
def fresh(engines: Engines) -> dict[int, Any]:
    """What the servers are, having loaded the checkpoint from disk and nothing else."""
    return {tp: state_of(server) for tp, server in engines.servers.items()}
