"""Real megatron ranks push into real servers: afterwards each server is what a fresh one is that loaded the export."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.spec import Placement, SyncSpec
from megatron_rl.resharding.sync import EngineSync
from megatron_rl.resharding.transport.network import Network
from megatron_rl.trainer import weights
from megatron_rl.trainer.worker import Worker
from tests.rollout.conftest import Engines
from tests.rollout.pushes import WAITING, FirstRank, RankHere, Servers, follow
from tests.rollout.servers import hf_config, state_of
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TP2 = {"tp": 2, "sp": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tp2": (2, TP2, ("tp1", "tp2")),
    "pp2": (2, {"pp": 2}, ("tp1", "tp2")),
    "ep2": (2, {"ep": 2}, ("tp1", "tp2")),
    "tp2_ep2": (2, {**TP2, "ep": 2}, ("tp1", "tp2", "far")),
    "pp2_ep2": (4, {"pp": 2, "ep": 2}, ("tp1", "tp2", "far twins", "twins")),
}
"""Ranks, layout, and the TARGETS that they push into."""
NODE = ((0, 0), (0, 1), (0, 2), (0, 3))
OTHER = ((1, 0), (1, 1), (1, 2), (1, 3))
TARGETS: dict[str, tuple[tuple[str, ...], int, tuple[Any, Any] | None]] = {
    "tp1": (("tp1",), 1, None),
    "tp2": (("tp2",), 2, None),
    "far": (("tp2",), 2, (NODE[:2], OTHER[:2])),
    "far twins": (("tp2", "twin"), 2, (NODE, OTHER)),
    # The first engine on the node of the last stage, on a device with a rank of it; the second far from all.
    "twins": (("tp2", "twin"), 2, ((*NODE[:2], *OTHER[:2]), (OTHER[0], OTHER[2], (2, 0), (2, 1)))),
}
"""Servers, their tp, and where trainer ranks and engine ranks stand; None: on one node."""


def push_all(
    rank: int, engines: Engines, layout: tuple[int, dict[str, Any], tuple[str, ...]], meeting: str, export: Path
) -> dict[str, tuple[list[Any], dict[str, float], int]]:
    """Push the other checkpoint, then their own, into each target, and export the latter.

    Returns: by target, the servers' states after each push, and the metrics of the second, on the first rank; the bytes
    that this rank sent to another node in the first push.
    """
    world_size, parallel, targets = layout
    worker = Worker(make_config(parallel, world_size=world_size), rank, str(engines.other))
    worker.build(meeting)
    ranks, found, crossed = FirstRank(worker) if rank == 0 else None, {}, []
    send = Network.send
    Network.send = lambda network, data, peer: (crossed.append(data.nbytes), send(network, data, peer))[1]
    for target in targets:
        names, tp, places = TARGETS[target]
        servers, placement = [engines.named[name] for name in names], places and Placement(*places)
        spec = engines.spec(worker.topology, tp=tp, engines=len(servers), placement=placement)
        sync = EngineSync(ranks, Servers(*servers), spec, **WAITING, verify_every=9) if ranks else None
        states, metrics, sent = [], {}, []
        for version, path in ((8, engines.other), (9, engines.path)):
            weights.import_hf(path, worker.tensors, worker.layouts)
            crossed.clear()
            if sync is None:
                follow(worker)
            else:
                metrics = sync.push(version=version)
                states.append([state_of(server) for server in servers])
                ranks.release()
            sent.append(sum(crossed))
        found[target] = states, metrics, sent[0]
    worker.export(str(export))
    worker.close()
    return found


def test_what_changed_leaves_a_server_as_everything_does(engines: Engines, fresh: dict[int, Any]) -> None:
    server = engines.servers[2]
    spec = engines.from_one_rank(delta=True)
    trainer = RankHere(engines.path, spec)
    sync = EngineSync(trainer, Servers(server), spec, **WAITING, verify_every=3)
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
    meeting = f"file://{tmp_path}/meeting"
    export = tmp_path / "export"
    export.mkdir()

    results = run_ranks(LAYOUTS[layout][0], push_all, engines, LAYOUTS[layout], meeting, export)

    exported, original = (load_file(p / "model.safetensors") for p in (export, engines.path))
    assert exported.keys() == original.keys()
    assert all(exported[name].numpy().tobytes() == original[name].numpy().tobytes() for name in original)
    lacking = lacking_on_other_nodes(original, layers=hf_config(engines.path)["num_hidden_layers"])
    for target, (states, metrics, _) in results[0].items():
        tp = TARGETS[target][1]
        for between, after in zip(*states, strict=True):
            assert after == fresh[tp]
            for old, new in zip(fresh[tp][0], between[0], strict=True):
                assert old.keys() == new.keys() and not set(old.items()) & set(new.items())
            assert between[1] != fresh[tp][1]
        assert metrics["sync/bytes_received"] == metrics["sync/bytes_needed"] > 0
        crossed, once = sum(found[target][2] for found in results), lacking[target]
        assert once <= crossed <= 1.02 * once  # rectangles begin at multiples of 16 bytes, and are small here


def lacking_on_other_nodes(tensors: dict[str, Any], *, layers: int) -> dict[str, int]:
    """By target, the bytes of a checkpoint that nodes with engines lack, each once a node."""
    served = {name: t.nbytes for name, t in tensors.items() if f"layers.{layers}." not in name}  # no prediction layer
    whole = sum(served.values())
    first = {f"model.layers.{i}." for i in range(layers // 2)}
    if len(served) == len(tensors):
        first.add("model.embed_tokens.")  # else prediction layers have another copy of it on the last stage
    of_first_stage = sum(nbytes for name, nbytes in served.items() if name.startswith(tuple(first)))
    return {"tp1": 0, "tp2": 0, "far": whole, "far twins": whole, "twins": of_first_stage + whole}


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
            (path, spec.direct): EngineSync(RankHere(path, spec), Servers(server), spec, **WAITING).push
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
