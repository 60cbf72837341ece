"""What a push takes beside the weights, as the kernel counts it: two messages on a side that gives, nothing else."""

import os
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.sender import Sender
from megatron_rl.resharding.spec import Placement, Push, SyncSpec
from tests.resharding.pushing import destinations, sources
from tests.resharding.test_push_processes import meet
from tests.tiny import TINY
from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.live

SMALL = {**TINY["qwen3_moe"], "vocab_size": 64}
MODEL = {**SMALL, "vocab_size": 8192, "hidden_size": 512, "moe_intermediate_size": 192, "num_experts": 16}
MESSAGE_BYTES = 2 << 20
FIXED_BYTES = 2 << 20
"""For views, connections and the measuring itself: 1 MB. A rank of either side has 56 MB of the weights."""
TWO_NODES = Placement(((0, 0), (0, 1)), ((1, 0), (1, 1)))


def own_bytes(part: Any) -> tuple[int, int]:
    """Of this process, now and at most since its peak was reset. Buffers of other processes that it maps are theirs."""
    own = {os.stat(buffer.path).st_ino for buffer in part._slots._buffers}
    others, is_other = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+) +(.*)", line):
            is_other = "memfd:" in mapping[2] and int(mapping[1]) not in own
        elif is_other and line.startswith("Rss:"):
            others += int(line.split()[1]) << 10
    status = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
    return (int(status["VmRSS"]) << 10) - others, (int(status["VmHWM"]) << 10) - others


def pushes(rank: int, specs: tuple[SyncSpec, SyncSpec], place: Path, session: str) -> list[int]:
    """Bytes that this rank, trainers before engines, took beyond what it had: in a push of each spec, and in another of
    the second. The first, of a small model, loads the code."""
    store, meeting = meet(place, first=rank == 0)
    taken, part = [], None
    for version, spec in enumerate((*specs, specs[1])):
        world_size = spec.trainer.world_size
        if version < 2:
            layouts = sources(spec)[rank] if rank < world_size else destinations(spec)[rank - world_size]
            tensors = {t.name: torch.ones(t.shape, dtype=getattr(torch, t.dtype)) for t in layouts}
            part = Sender(spec, rank) if rank < world_size else Receiver(spec, rank - world_size)
        push = Push(meeting, f"{session}/{spec is specs[0]}", version)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before, _ = own_bytes(part)
        (part.send if rank < world_size else part.receive)(tensors, push)
        taken.append(own_bytes(part)[1] - before)
        store.set(f"{version}/{rank}", "")
        store.wait([f"{version}/{r}" for r in range(world_size + spec.readers)])
    store.set(f"bye/{rank}", "")
    if rank == 0:
        store.wait([f"bye/{r}" for r in range(world_size + spec.readers)])
    return taken


@pytest.mark.parametrize("placement", [None, TWO_NODES], ids=["node", "network"])
def test_two_messages_are_all_that_a_push_takes_beside_the_weights(placement: Placement | None, tmp_path: Path) -> None:
    topologies = MegatronTopology(world_size=2, pp=2, num_layers=4), SglangTopology(tp=2)
    options = {"bucket_bytes": MESSAGE_BYTES, "placement": placement}
    specs = tuple(SyncSpec(hf, *topologies, "float32", "float32", **options) for hf in (SMALL, MODEL))

    results = run_ranks(4, pushes, specs, tmp_path / "meeting", secrets.token_hex(8))

    gives = [True, True, *[placement is not None] * 2]  # between nodes a reader hands on what others need too
    for (_, first, second), is_giver in zip(results, gives, strict=True):
        assert first <= 2 * MESSAGE_BYTES * is_giver + FIXED_BYTES
        assert second <= FIXED_BYTES
    assert all(first > MESSAGE_BYTES for _, first, _ in results[:2])  # the measure sees the buffers
