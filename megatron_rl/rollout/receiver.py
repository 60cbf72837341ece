"""Runs inside SGLang's scheduler processes: takes a new version of the weights from the trainer's ranks.

A message is JSON: {"spec", "engine", "push"}. `spec` is there when it changed. Errors go back to the caller, by rank,
and the server lives on: paused, until a push succeeds.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput
from sglang.srt.runtime_context import get_parallel

from megatron_rl.errors import LayoutError, SyncError
from megatron_rl.layouts import fp8
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.spec import Push, SyncSpec
from megatron_rl.rollout.options import LOADER

_STATE = "_megatron_rl"
"""Attribute of the served model that holds its `Receiver` and the report of the last load."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: bring `model` to what the message describes.

    Raises: LayoutError when the model is not what the layout table declares; SyncError when the push fails.
    """
    message = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
    rank = get_parallel().tp_rank
    state: dict[str, Any] = model.__dict__.setdefault(_STATE, {})
    if message["spec"] is not None:
        if "receiver" in state:
            state.pop("receiver").close()
        spec = SyncSpec.from_json(message["spec"])
        reader = message["engine"] * spec.engine.world_size + rank
        state["receiver"] = Receiver(spec, reader, next(model.parameters()).device)
        state["direct"] = spec.direct
    if "receiver" not in state:
        raise SyncError(f"engine rank {rank} has no plan yet: the first message to a server must carry the spec.")
    push = Push(**message["push"])
    take: Any = list if state["direct"] else partial(load_named, model)  # a direct push has no named tensors
    state["report"] = asdict(state["receiver"].receive(weights_of(model), push, take))
    if state["direct"] and hasattr(model, "post_load_weights") and not push.compare:
        # MLA attends with matrices derived from kv_b_proj; SGLang does not refresh them after a custom loader.
        model.post_load_weights()  # type: ignore[operator]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters, by name. With FP8 weights SGLang has scales of the KV cache too, which no checkpoint here holds.

    They become 1, as without any in a checkpoint; an engine that begins with random weights has random ones.
    Raises: LayoutError when scales of the weights are no longer those of the checkpoint's blocks.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith((".k_scale", ".v_scale")):
            parameter.data.fill_(1.0)
        elif name.endswith(fp8.SCALE) and parameter.dtype != torch.float32:
            raise LayoutError(
                f"SGLang keeps {name} as {list(parameter.shape)} {parameter.dtype}: for the kernels of this GPU it "
                "quantizes weights anew and packs scales. Set rollout.sglang.fp8_gemm_runner_backend=triton."
            )
        else:
            weights[name] = parameter
    return weights


def load_named(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's own loader of the model, which takes HF tensors, whole, and does what its quantization wants.

    One call for all: DeepSeek's drops q_a_proj when kv_a_proj_with_mqa is not in the same, and at its end refreshes the
    derived matrices of the layers that it saw.
    Raises: SyncError when the loader finds that they are not the model's.
    """

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            # What SGLang looks at to copy a tensor before it asks for the next one. On a CPU it would leave that to a
            # pool of threads, behind which the whole model can pile up.
            tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
            yield name, tensor

    try:
        model.load_weights(one_by_one())  # type: ignore[operator]
    except (AssertionError, AttributeError, LookupError) as error:
        raise SyncError(
            f"SGLang's own loader did not take the weights: {error!r}. It may be unable to load a running model again "
            "with these options (rollout.sglang): choose others."
        ) from error


def in_a_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around SGLang's SchedulerWeightUpdaterManager.update_weights_from_tensor: begins and ends the update itself.

    As requests of their own, each would go through three processes and back, while the trainer waits.
    """
    if request.load_format != LOADER:
        return original(manager, request)
    manager.begin_weight_update(BeginWeightUpdateReqInput())
    try:
        return original(manager, request)
    finally:
        manager.end_weight_update(EndWeightUpdateReqInput())


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
    except (ValueError, RuntimeError, OSError, MemoryError, KeyError, TypeError) as raised:
        succeeded, error = False, f"{type(raised).__name__}: {raised}"
    report = updater.get_model().__dict__[_STATE]["report"] if succeeded else {"error": error}
    group = get_parallel().tp_group.cpu_group
    reports: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(reports, report, group=group)
    errors = [f"engine rank {rank}: {r['error']}" for rank, r in enumerate(reports) if "error" in r]
    return (False, "; ".join(errors)) if errors else (True, json.dumps(reports))
