"""What SGLang 0.5.23 lacks to run its torch_native backend without a GPU, with the same weight layout as on one."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, _dispatch_mla_subtype
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from megatron_rl.rollout.sglang_cpu import attention
from megatron_rl.rollout.sglang_cpu.fp8 import activate_fp8

PAUSED_POLL_MS = 2
"""Short, for with data-parallel attention only one of those who wait here gets the message, and then waits for all."""
TORCH_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def activate_cpu() -> None:
    """Register them."""
    # Without a handler of its own torch_native gets triton's, whose prefill it cannot run on an MLA pool.
    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)
    # The default allocator pins host memory through CUDA.
    ALLOC_MEMORY_FUNCS["cpu"] = _plain_host_tensor
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")
    # It replaces torch's kernels by Triton ones for CUDA.
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        _do_nothing,
        HookType.REPLACE,
    )
    # Data-parallel attention pads batches, and asks for this one on a CPU.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = _one
    # It calls torch once for every sequence of every layer.
    for name, ours in (("_run_sdpa_forward_decode", attention.decode), ("_run_sdpa_forward_extend", attention.extend)):
        HookRegistry.register(f"{TORCH_NATIVE}.{name}", ours, HookType.AROUND)
    # It pads heads and intermediate sizes for AMX kernels, so that weights would lie otherwise than on a GPU.
    HookRegistry.register(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _keep_config, HookType.REPLACE
    )
    # Qwen2-MoE's gate of the shared expert is a Triton kernel on anything but AMX.
    HookRegistry.register(
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add", _add_gated, HookType.REPLACE
    )
    # Latent attention takes positions without scaling on a GPU only.
    HookRegistry.register(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", _or_plain_positions, HookType.AROUND
    )
    # `sleep_on_idle` is not for paused schedulers: in a weight update they would poll, on the cores that it needs.
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        _wait_for_requests,
        HookType.BEFORE,
    )
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _then_fork, HookType.AROUND)
    activate_fp8()


def _wait_for_requests(scheduler: Any) -> None:
    if scheduler.idle_sleeper is not None:  # on one rank of those that get the same requests
        scheduler.idle_sleeper.poller.poll(PAUSED_POLL_MS)


def _then_fork(original: Callable[[object], None], server_args: object) -> None:
    """Spawned, as SGLang wants it, each of its processes imports all of it again: 10 CPU seconds. CUDA needs that."""
    original(server_args)
    multiprocessing.set_start_method("fork", force=True)


def _add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, total: torch.Tensor) -> None:
    """hidden, shared, total [T, H], gate [H]: what a shared expert gives is scaled, and added to the others' sum."""
    total.add_(torch.sigmoid(hidden @ gate)[:, None] * shared)


def _or_plain_positions(
    original: Callable[..., object],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict | None = None,
    *options: object,
) -> object:
    arguments = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
    return get_rope(*arguments) if rope_scaling is None else original(*arguments, *options)


def _plain_host_tensor(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: object,
    *_: object,
    **__: object,
) -> torch.Tensor:
    return allocator.allocate(dims, dtype=dtype, device="cpu")  # type: ignore[attr-defined]


def _one(self: object) -> int:
    """Length of the sequences that fill a batch up, as SGLang's other backends have it."""
    return 1


def _do_nothing(self: object) -> None:
    return None


def _keep_config(model_config: object, load_config: object, tp_size: int) -> object:
    return model_config
