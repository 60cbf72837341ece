"""Runs a function on several real ranks at once: forked from this process, which has imported torch and megatron."""

import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

import megatron_rl.trainer.worker  # noqa: F401 # imported before forking: once, not once a rank
from megatron_rl.convert.workers import begin_fork


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0, mortal: Collection[int] = ()
) -> list[Any]:
    """[function(rank, *args) for each rank], each in its own process; None for one of `mortal` that died.

    Raises: what the first failing rank raised, or TimeoutError; no process is left.
    """
    children = [_fork(function, rank, args, timeout_s) for rank in range(world_size)]
    results: dict[int, Any] = {}
    buffers: dict[int, bytes] = dict.fromkeys(range(world_size), b"")
    deadline = time.monotonic() + timeout_s
    try:
        while len(results) < world_size:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(children) if rank not in results}
            ready, _, _ = select.select(list(waiting), [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish within {timeout_s} s")
            for pipe in ready:
                rank = waiting[pipe]
                if data := os.read(pipe, 1 << 20):
                    buffers[rank] += data
                    continue
                if not buffers[rank] and rank in mortal:
                    results[rank] = None
                    continue
                if not buffers[rank]:
                    raise RuntimeError(f"rank {rank} died")
                ok, value = pickle.loads(buffers[rank])
                if not ok:
                    raise value
                results[rank] = value
    finally:
        for pid, pipe in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
    return [results[rank] for rank in range(world_size)]


def _fork(function: Callable[..., Any], rank: int, args: Sequence[Any], timeout_s: float) -> tuple[int, int]:
    read, write = os.pipe()
    owner, pid = os.getpid(), os.fork()
    if pid:
        os.close(write)
        return pid, read
    begin_fork(owner)
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=sys.__stderr__)  # where it waits
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as in a run: each group would ask the DNS where this machine is
    try:
        answer = (True, function(rank, *args))
    except BaseException as error:  # noqa: BLE001 # carried to the test
        traceback.print_exc(file=sys.__stderr__)
        error.__traceback__ = None
        answer = (False, error)
    try:
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
    finally:
        os._exit(0)
