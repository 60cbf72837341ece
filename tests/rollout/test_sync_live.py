"""Real megatron ranks push into real servers: afterwards each server is what a fresh one is that loaded the export."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_rl.errors import SyncError
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.spec import SyncSpec
from megatron_rl.resharding.sync import EngineSync
from megatron_rl.rollout.server import Server
from megatron_rl.trainer import weights
from megatron_rl.trainer.worker import Worker
from tests.resharding.pushing import flip_a_bit
from tests.rollout.conftest import Engines
from tests.rollout.pushes import FirstRank, OneServer, RankHere, follow, gather
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


def state_of(server: Server) -> tuple[list[dict[str, str]], list[int]]:
    """Checksum of every parameter of every rank, and greedy text, which sees MLA's derived matrices too."""
    return server.checksums(), greedy_text(server)


def push_both(
    rank: int, engines: Engines, parallel: dict[str, Any], world_size: int, meeting: str, export: Path
) -> dict[int, Any]:
    """Push the other checkpoint, then their own, into both servers. [tp] -> (state between, state after, metrics)."""
    worker = Worker(make_config(parallel, world_size=world_size), rank, str(engines.other))
    worker.build(meeting)
    found = {}
    if rank == 0:
        ranks, syncs, states = FirstRank(worker), {}, {}
        for tp, server in engines.servers.items():
            spec = SyncSpec(hf_config(engines.path), worker.topology, SglangTopology(tp=tp), "float32", "float32")
            syncs[tp] = EngineSync(ranks, OneServer(server), spec, gather=gather, verify_every=9)
            syncs[tp].push(version=8)
            states[tp] = state_of(server)
        ranks.release()
    else:
        follow(worker)
    weights.import_hf(engines.path, worker.tensors, worker.layouts)
    worker.export(str(export))
    if rank == 0:
        for tp, server in engines.servers.items():
            metrics = syncs[tp].push(version=9)
            found[tp] = (states[tp], state_of(server), metrics)
        ranks.release()
    else:
        follow(worker)
    worker.close()
    return found


@pytest.fixture(scope="module")
def fresh(engines: Engines) -> Iterator[dict[int, Any]]:
    """What the servers are, having loaded the checkpoint from disk and nothing else."""
    return {tp: state_of(server) for tp, server in engines.servers.items()}


def test_an_error_on_one_rank_names_it_and_a_later_push_heals(
    engines: Engines, fresh: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = engines.servers[2]
    good = SyncSpec(
        hf_config(engines.path),
        MegatronTopology(world_size=1, num_layers=4, mtp_layers=int(engines.family == "deepseek_v3")),
        SglangTopology(tp=2),
        *["float32"] * 2,
    )
    other = RankHere(engines.other, good)
    sync = EngineSync(other, OneServer(server), good, gather=gather)
    narrow = replace(good, engine_dtype="bfloat16")

    with monkeypatch.context() as patch:
        flip_a_bit(patch)
        with pytest.raises(SyncError, match=r"engine 0 rank \d: the \d+ bytes of message .*trainer rank 0 .*checksum"):
            sync.push(version=7)
    with pytest.raises(SyncError, match="may hold a mixture of weights"):
        greedy_text(server)
    with pytest.raises(
        SyncError, match=r"(?s)engine rank 0: LayoutError.*float32, declared .*engine rank 1: LayoutErr"
    ):
        EngineSync(RankHere(engines.other, narrow), OneServer(server), narrow, gather=gather).push(version=8)
    sync.push(version=9)
    assert state_of(server) != fresh[2]
    EngineSync(RankHere(engines.path, good), OneServer(server), good, gather=gather).push(version=10)

    assert state_of(server) == fresh[2]


def test_what_changed_leaves_a_server_as_everything_does(engines: Engines, fresh: dict[int, Any]) -> None:
    server = engines.servers[2]
    spec = SyncSpec(
        hf_config(engines.path),
        MegatronTopology(world_size=1, num_layers=4, mtp_layers=int(engines.family == "deepseek_v3")),
        SglangTopology(tp=2),
        *["float32"] * 2,
        delta=True,
    )
    trainer = RankHere(engines.path, spec)
    sync = EngineSync(trainer, OneServer(server), spec, gather=gather, verify_every=3)
    original = {name: t.clone() for name, t in trainer.tensors.items()}
    for t in trainer.tensors.values():
        t.flatten()[::50] += 0.5
    metrics = [sync.push(version=1)]
    between = state_of(server)
    for name, t in trainer.tensors.items():
        t.copy_(original[name])
    metrics += [sync.push(version=2), sync.push(version=3)]

    assert between != fresh[2] == state_of(server)
    needed = metrics[0]["sync/bytes_needed"]
    assert metrics[0]["sync/bytes_received"] == needed and "sync/changed_share" not in metrics[0]
    assert 0.02 < metrics[1]["sync/changed_share"] < 0.03
    assert 0.04 < metrics[1]["sync/bytes_received"] / needed < 0.06
    assert metrics[2]["sync/bytes_received"] == metrics[2]["sync/changed_share"] == 0


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


def test_what_sglangs_own_loader_takes_leaves_what_is_written_in_place(engines: Engines, fresh: dict[int, Any]) -> None:
    layers = hf_config(engines.path)["num_hidden_layers"]
    tensors = load_file(engines.path / "model.safetensors")
    sizes = [
        tensor.nbytes for name, tensor in tensors.items() if f"layers.{layers}." not in name
    ]  # no prediction layer
    trainer = MegatronTopology(world_size=1, num_layers=layers, mtp_layers=int(engines.family == "deepseek_v3"))
    for tp, server in engines.servers.items():
        direct = SyncSpec(hf_config(engines.path), trainer, SglangTopology(tp=tp), "float32", "float32")
        streamed = replace(direct, direct=False, bucket_bytes=1 << 16)
        ways = itertools.product((engines.other, engines.path), (direct, streamed))
        push = {
            (path, spec.direct): EngineSync(RankHere(path, spec), OneServer(server), spec, gather=gather).push
            for path, spec in ways
        }
        push[engines.other, True](version=20)
        between = state_of(server)
        metrics = push[engines.path, False](version=21)
        assert state_of(server) == fresh[tp] != between
        assert metrics["sync/bytes_received"] == metrics["sync/bytes_needed"] == tp * sum(sizes)
        assert metrics["sync/staging_bytes"] <= 2 * max(1 << 16, *sizes)
        push[engines.other, False](version=22)
        assert state_of(server) == between
        push[engines.path, True](version=23)
        assert state_of(server) == fresh[tp]
