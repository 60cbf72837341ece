"""Real megatron ranks push into real servers: afterwards each server is what a fresh one is that loaded the export."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.errors import SyncError
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.execute import Sender
from megatron_rl.resharding.spec import Bucket, LoadReport, SyncSpec, compile_sync
from megatron_rl.resharding.sync import EngineSync
from megatron_rl.rollout.server import Server
from megatron_rl.trainer import weights
from megatron_rl.trainer.worker import Worker
from tests.rollout.conftest import Engines
from tests.rollout.servers import greedy_text, hf_config
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TP2 = {"tp": 2, "sp": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2_ep2": (2, {**TP2, "ep": 2}),
    "pp2_ep2": (4, {"pp": 2, "ep": 2}),
}


class OneRank:
    """The trainer as this rank sees it: every rank packs, and all get every bucket."""

    def __init__(self, worker: Worker):
        self.worker = worker

    def send_weights(self, spec: SyncSpec) -> list[Bucket]:
        packed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(packed, self.worker.send_weights(spec))
        return [bucket for buckets in packed for bucket in buckets]


class FirstRankOnly:
    """One server, called by the first rank alone; the others wait until it has answered."""

    def __init__(self, server: Server):
        self.server = server

    def pause(self) -> None:
        if dist.get_rank() == 0:
            self.server.pause()

    def load_weights(self, spec: SyncSpec, buckets: list[Bucket], *, verify: bool) -> list[list[LoadReport]]:
        reports = [self.server.load_weights(spec, buckets, verify=verify)] if dist.get_rank() == 0 else []
        dist.barrier()
        return reports

    def commit(self, version: int) -> None:
        if dist.get_rank() == 0:
            self.server.commit(version)


def state_of(server: Server) -> tuple[list[dict[str, str]], list[int]]:
    """Checksum of every parameter of every rank, and greedy text, which sees MLA's derived matrices too."""
    return server.checksums(), greedy_text(server)


def push_both(
    rank: int, engines: Engines, parallel: dict[str, Any], world_size: int, meeting: str, export: Path
) -> dict[int, Any]:
    """Push the other checkpoint, then their own, into both servers. [tp] -> (state between, state after, metrics)."""
    worker = Worker(make_config(parallel, world_size=world_size), rank, str(engines.other))
    worker.build(meeting)
    syncs = {}
    for tp, server in engines.servers.items():
        spec = SyncSpec(hf_config(engines.path), worker.topology, SglangTopology(tp=tp), "float32", "float32")
        syncs[tp] = EngineSync(OneRank(worker), FirstRankOnly(server), spec, verify_every=9)
        syncs[tp].push(version=8)
    states = {tp: state_of(server) for tp, server in engines.servers.items()} if rank == 0 else {}
    weights.import_hf(engines.path, worker.tensors, worker.layouts)
    worker.export(str(export))
    found = {}
    for tp, server in engines.servers.items():
        metrics = syncs[tp].push(version=9)
        if rank == 0:
            found[tp] = (states[tp], state_of(server), metrics)
    worker.close()
    return found


@pytest.fixture(scope="module")
def fresh(engines: Engines) -> Iterator[dict[int, Any]]:
    """What the servers are, having loaded the checkpoint from disk and nothing else."""
    return {tp: state_of(server) for tp, server in engines.servers.items()}


def push_here(server: Server, spec: SyncSpec, path: Path, **damage: Any) -> None:
    """A push from one rank in this process; `damage` changes the bucket of the engine's last rank."""
    sender, layouts = Sender(spec, 0), compile_sync(spec).sources[0]
    tensors = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in layouts}
    weights.import_hf(path, tensors, layouts)
    *rest, last = sender.pack(tensors)
    server.pause()
    server.load_weights(spec, [*rest, replace(last, **damage)])
    server.commit(9)
    sender.close()


def test_an_error_on_one_rank_names_it_and_a_later_push_heals(engines: Engines, fresh: dict[int, Any]) -> None:
    server = engines.servers[2]
    good = SyncSpec(
        hf_config(engines.path),
        MegatronTopology(world_size=1, num_layers=4, mtp_layers=int(engines.family == "deepseek_v3")),
        SglangTopology(tp=2),
        *["float32"] * 2,
    )
    narrow = replace(good, engine_dtype="bfloat16")

    with pytest.raises(SyncError, match=r"engine rank 1: SyncError.*digest") as damaged:
        push_here(server, good, engines.other, digest="0" * 32)
    with pytest.raises(SyncError, match="may hold a mixture of weights"):
        greedy_text(server)
    with pytest.raises(SyncError, match=r"engine rank 1: SyncError.*computed plan .* packed by"):
        push_here(server, good, engines.other, plan_hash="1" * 32)
    with pytest.raises(
        SyncError, match=r"(?s)engine rank 0: LayoutError.*float32, declared .*engine rank 1: LayoutErr"
    ):
        push_here(server, narrow, engines.other)
    push_here(server, good, engines.path)

    assert "engine rank 0" not in str(damaged.value)
    assert state_of(server) == fresh[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pushed_server_equals_one_that_loaded_the_export(
    engines: Engines, fresh: dict[int, Any], layout: str, tmp_path: Path
) -> None:
    world_size, parallel = LAYOUTS[layout]
    meeting = f"file://{tmp_path}/meeting"
    export = tmp_path / "export"
    export.mkdir()

    results = run_ranks(world_size, push_both, engines, parallel, world_size, meeting, export)

    exported, original = (load_file(p / "model.safetensors") for p in (export, engines.path))
    assert exported.keys() == original.keys()
    assert all(exported[name].numpy().tobytes() == original[name].numpy().tobytes() for name in original)
    for tp, (between, after, metrics) in results[0].items():
        assert after == fresh[tp]
        for old, new in zip(fresh[tp][0], between[0], strict=True):
            assert old.keys() == new.keys() and not set(old.items()) & set(new.items())
        assert between[1] != fresh[tp][1]
        assert metrics["sync/bytes_received"] == metrics["sync/bytes_needed"] > 0
