"""Pushes from trainers that tests run themselves into servers: calls are futures here, or Ray's references."""

import concurrent.futures
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from megatron_rl import cluster
from megatron_rl.layouts.compile import megatron_layouts
from megatron_rl.models import load_table
from megatron_rl.resharding.sender import Sender
from megatron_rl.resharding.spec import Push, SyncSpec
from megatron_rl.rollout.server import Server
from megatron_rl.trainer.weights import import_hf
from megatron_rl.trainer.worker import Worker

LIMIT_S = 300.0
"""For a push, which takes seconds; test machines may be busy."""


def gather(calls: Mapping[str, Any]) -> list[Any]:
    """Results in order. Raises: the last call's error, which is an engine's, before the others'."""
    results = {}
    for name, call in reversed(calls.items()):
        if isinstance(call, ray.ObjectRef):
            (results[name],) = cluster.gather({name: call}, what="Weight sync", timeout_s=LIMIT_S)
        else:
            results[name] = call.result(LIMIT_S)
    return [results[name] for name in calls]


def still_running(calls: Mapping[str, Any], timeout_s: float) -> list[str]:
    """Names of the calls that have not ended within `timeout_s`."""
    refs = {name: call for name, call in calls.items() if isinstance(call, ray.ObjectRef)}
    futures = {call: name for name, call in calls.items() if name not in refs}
    _, late = concurrent.futures.wait(futures, timeout_s)
    return [*cluster.still_running(refs, timeout_s), *(futures[call] for call in late)]


WAITING = {"gather": gather, "still_running": still_running}


def in_thread(call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """A call that has begun."""
    return ThreadPoolExecutor(1).submit(call, *args, **options)


class Servers:
    """Satisfies `sync.WeightReceiver`, as `fleet.Fleet` does over actors."""

    def __init__(self, *servers: Server):
        self.servers = servers

    def pause(self) -> None:
        for server in self.servers:
            server.pause()

    def loading(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        return {
            f"engine-{i}": in_thread(server.load_weights, spec, push, engine=i) for i, server in enumerate(self.servers)
        }

    def commit(self, version: int) -> None:
        for server in self.servers:
            server.commit(version)
        for server in self.servers:
            server.resume()


class Meeting:
    """Where ranks find each other."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meeting(self) -> str:
        return f"127.0.0.1:{self.store.port}"


class RankHere(Meeting):
    """A trainer of one rank, in this process. Satisfies `sync.WeightSender`."""

    def __init__(self, path: Path, spec: SyncSpec):
        super().__init__()
        layouts = megatron_layouts(load_table(spec.hf_config), spec.trainer, 0, dtype=spec.trainer_dtype)
        self.tensors = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in layouts}
        import_hf(path, self.tensors, layouts)
        self.sender = Sender(spec, 0)

    def sending(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        return {"trainer-0": in_thread(self.sender.send, self.tensors, push)}


class FirstRank(Meeting):
    """Megatron ranks, each its own process, as the first of them sees them. Satisfies `sync.WeightSender`."""

    def __init__(self, worker: Worker):
        super().__init__()
        self.worker = worker

    def sending(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        dist.broadcast_object_list([(spec, push)])
        return {"trainer-0": in_thread(self.worker.send_weights, spec, push)}

    def release(self) -> None:
        """The other ranks go on."""
        dist.broadcast_object_list([None])


def follow(worker: Worker) -> None:
    """What the other ranks do until they are released."""
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told)
        if told[0] is None:
            return
        worker.send_weights(*told[0])
