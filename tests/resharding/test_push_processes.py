"""Pushes between processes, of which one is killed in the middle: sender, receiver, or a receiver that hands on."""

import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import SyncError
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.sender import Sender
from megatron_rl.resharding.spec import Placement, Push, SyncSpec
from megatron_rl.resharding.transport.links import STALL_S
from megatron_rl.resharding.transport.shm import SharedBuffer
from megatron_rl.resharding.transport.slots import Slots
from tests.resharding.pushing import PAD, destinations, fill, make_spec, sources
from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.live

TWO_NODES = Placement(((0, 0), (0, 1), (1, 0), (1, 1)), ((1, 2), (1, 3)))
SOON_S = STALL_S - 2
"""In which survivors must be back: they are told by the operating system, not by a deadline."""


def kill_at(count: int) -> Callable[..., Any]:
    """Wraps a function: its call with that number kills the process."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(1, 1_000_000))

        def call(*args: Any, **options: Any) -> Any:
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call

    return wrap


def meet(place: Path, *, first: bool) -> tuple[dist.TCPStore, str]:
    """The store that the first rank keeps, and its address.

    Not the process that forks: its server asks the DNS, and a lock of libc held meanwhile would stay held in a fork.
    """
    if first:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
    else:
        while not place.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False, wait_for_workers=False)
    return store, f"127.0.0.1:{place.read_text()}"


def both_pushes(
    rank: int, spec: SyncSpec, directory: Path, sessions: list[str], victim: int, count: int, is_opened: bool
) -> tuple[str, float, bool]:
    """What a rank, trainers before engines, met in two pushes: the first's error, its seconds, the second's success.

    `victim` dies in the first, before its memory could be opened unless `is_opened`; the last process takes its place
    in the second.
    """
    world_size = spec.trainer.world_size
    is_new = rank == world_size + spec.readers
    rank = victim if is_new else rank
    store, meeting = meet(directory / "meeting", first=rank == 0)
    part: Any
    if rank < world_size:
        part, tensors = Sender(spec, rank), fill(sources(spec)[rank])
        step = lambda push: part.send(tensors, push)  # noqa: E731
    else:
        wanted = fill(destinations(spec)[(rank - world_size) % spec.engine.world_size])
        tensors = {name: torch.full_like(t, PAD) for name, t in wanted.items()}
        part = Receiver(spec, rank - world_size)
        step = lambda push: part.receive(tensors, push)  # noqa: E731
    error, seconds = "", 0.0
    if not is_new:
        if rank == victim:
            owner, name = (Slots, "offer") if rank < world_size else (part, "_take")
            setattr(owner, name, kill_at(count)(getattr(owner, name)))
            if not is_opened:
                SharedBuffer.path = "/proc/0/fd/0"  # type: ignore[method-assign,assignment]
        begin = time.monotonic()
        try:
            step(Push(meeting, sessions[0], 1))
        except SyncError as failure:
            error = str(failure)
        seconds = time.monotonic() - begin
        store.set(f"back/{rank}", "")
    survivors = [r for r in range(world_size + spec.readers) if r != victim]
    store.wait([f"back/{r}" for r in survivors])
    step(Push(meeting, sessions[1], 2))
    store.set(f"whole/{rank}", "")
    everybody = range(world_size + spec.readers)
    store.wait([f"whole/{r}" for r in everybody])  # none ends while others still push
    store.set(f"bye/{rank}", "")
    if rank == 0:
        store.wait([f"bye/{r}" for r in everybody])  # nor the one that keeps the store while others ask it
    return error, seconds, rank < world_size or all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("placement", "victim", "name", "is_opened"),
    [
        pytest.param(None, 1, "trainer rank 1", True, id="sender-node"),
        pytest.param(None, 1, "trainer rank 1", False, id="sender-unread"),
        pytest.param(TWO_NODES, 1, "trainer rank 1", True, id="sender-network"),
        pytest.param(None, 4, "engine 0 rank 0", True, id="receiver-node"),
        pytest.param(TWO_NODES, 4, "engine 0 rank 0", True, id="receiver-network"),
    ],
)
def test_a_rank_that_is_killed_is_named_and_a_new_one_takes_its_place(
    placement: Placement | None, victim: int, name: str, is_opened: bool, tmp_path: Path
) -> None:
    spec = make_spec("qwen3_moe", "pp2_vpp2_ep2", "tp2", placement=placement, bucket_bytes=8192)
    sessions = [secrets.token_hex(8) for _ in range(2)]

    count = 3 if is_opened else 2  # soon after the first, of which the takers tell it that they cannot open it

    results = run_ranks(7, both_pushes, spec, tmp_path, sessions, victim, count, is_opened, mortal=(victim,))

    survivors = [result for rank, result in enumerate(results[:6]) if rank != victim]
    assert results[victim] is None
    errors = [error for error, _, _ in survivors]
    assert any(name in error for error in errors), errors
    assert all(seconds < SOON_S for _, seconds, _ in survivors)
    assert all(complete for _, _, complete in (*survivors, results[6]))
