"""Runs inside SGLang's scheduler processes: takes a new version of the weights out of shared memory.

A message is JSON: {"spec", "buckets": [one list per engine rank], "verify"}. `spec` is there when it changed. Errors go
back to the caller, by rank, and the server lives on: paused, until a push succeeds.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel

from megatron_rl.errors import SyncError
from megatron_rl.resharding.execute import Receiver
from megatron_rl.resharding.spec import Bucket, LoadReport, SyncSpec
from megatron_rl.rollout.options import LOADER

_STATE = "_megatron_rl"
"""Attribute of the served model that holds its `Receiver` and the report of the last load."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: bring `model` to what the message describes.

    Raises: LayoutError when the model is not what the layout table declares; SyncError when a bucket is not as sent.
    """
    message = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
    rank = get_parallel().tp_rank
    state: dict[str, Any] = model.__dict__.setdefault(_STATE, {})
    if message["spec"] is not None:
        state["receiver"] = Receiver(SyncSpec.from_json(message["spec"]), rank, dict(model.named_parameters()))
    if "receiver" not in state:
        raise SyncError(f"engine rank {rank} has no plan yet: the first message to a server must carry the spec.")
    receiver: Receiver = state["receiver"]
    buckets = [Bucket(**b) for b in message["buckets"][rank]]
    received = receiver.load(buckets)
    if hasattr(model, "post_load_weights"):
        # MLA attends with matrices derived from kv_b_proj; SGLang does not refresh them after a custom loader.
        model.post_load_weights()  # type: ignore[operator]
    if message["verify"]:
        receiver.verify(buckets)
    state["report"] = asdict(LoadReport(received, receiver.needed_bytes))


def report_instead_of_raising(
    original: Callable[..., tuple[bool, str]], updater: Any, named_tensors: Any, load_format: str | None = None
) -> tuple[bool, str]:
    """Around SGLang's WeightUpdater.update_weights_from_tensor: the errors of all ranks, or all reports as JSON.

    A loader that raises would kill the server, and only rank 0's answer reaches the caller. Our message comes as bytes,
    which SGLang's checks of what it unpickles let pass in every version, and goes on as the tensor that it expects.
    """
    if load_format != LOADER:
        return original(updater, named_tensors=named_tensors, load_format=load_format)
    try:
        message = [("message", torch.frombuffer(bytearray(named_tensors), dtype=torch.uint8))]
        succeeded, error = original(updater, named_tensors=message, load_format=load_format)
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as raised:
        succeeded, error = False, f"{type(raised).__name__}: {raised}"
    report = updater.get_model().__dict__[_STATE]["report"] if succeeded else {"error": error}
    group = get_parallel().tp_group.cpu_group
    reports: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(reports, report, group=group)
    errors = [f"engine rank {rank}: {r['error']}" for rank, r in enumerate(reports) if "error" in r]
    return (False, "; ".join(errors)) if errors else (True, json.dumps(reports))
