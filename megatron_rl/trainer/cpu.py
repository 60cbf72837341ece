"""What megatron-core needs to run on a machine without CUDA, over gloo.

megatron-core asks for a GPU's device, streams, events and random state. `install` gives each a CPU meaning, once, and
only where there is no CUDA. The arithmetic stays megatron's; `local_spec` stands in for Transformer Engine's modules.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


class _Stream:
    """A CUDA stream or event where everything is already in order."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> "_Stream":
        return self

    wait_event = wait = record = synchronize = wait_stream


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _stream(*_: Any, **__: Any) -> _Stream:
    return _Stream()


@contextlib.contextmanager
def _in_stream(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _patch_device() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value] # megatron only passes it as device=
    torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.empty_cache = _nothing  # type: ignore[assignment]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing


def _patch_streams() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = _stream  # type: ignore[assignment]
    torch.cuda.stream = _in_stream  # type: ignore[assignment]
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign,assignment]


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "eye", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "as_tensor"),
)


def _patch_factories() -> None:
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    to = torch.Tensor.to

    @functools.wraps(to)
    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    torch.Tensor.to = tensor_to  # type: ignore[method-assign,assignment]


def _patch_random() -> None:
    """The tracker of CUDA random states keeps them on the CPU's generator."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    def get(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get  # type: ignore[assignment]
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = put  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))  # type: ignore[assignment,return-value]
    random._get_cuda_rng_state = get
    for module in (random, schedules, cuda_graphs):
        if hasattr(module, "_set_cuda_rng_state"):
            module._set_cuda_rng_state = put
    # A fork of the tracker warns when the CPU's state moves inside it; here that is what it is for.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


class _TypeName(str):
    """`torch.FloatTensor` that also equals "torch.cuda.FloatTensor": the optimizer compares these strings."""

    def __eq__(self, other: object) -> bool:
        return str(self) == (other.replace("torch.cuda.", "torch.") if isinstance(other, str) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _patch_type_names() -> None:
    real = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = real(self, *args, **kwargs)
        return _TypeName(out) if isinstance(out, str) else out

    torch.Tensor.type = tensor_type  # type: ignore[method-assign,assignment]


def _patch_collectives() -> None:
    """gloo wants split sizes as a list, and gathers and scatters only parts of one size."""
    real_all_to_all, real_all_gather = dist.all_to_all_single, dist.all_gather
    real_reduce_scatter = dist.reduce_scatter

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(real_all_to_all)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return real_all_to_all(output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op)

    @functools.wraps(real_all_gather)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = [t.shape[0] if t.dim() else 1 for t in tensor_list]
        if len(set(rows)) == 1:
            return real_all_gather(tensor_list, tensor, group, async_op)
        assert not async_op, "unequal parts are gathered padded, then copied"
        padded = tensor.new_empty(max(rows), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        real_all_gather(parts, padded, group)
        for out, part, count in zip(tensor_list, parts, rows, strict=True):
            out.copy_(part[:count])
        return None

    @functools.wraps(real_reduce_scatter)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({t.shape for t in input_list}) == 1:
            return real_reduce_scatter(output, input_list, op, group, async_op)
        assert not async_op and op == dist.ReduceOp.SUM, "unequal parts are summed whole, then cut"
        whole = torch.cat(input_list)
        dist.all_reduce(whole, op, group)
        output.copy_(whole.split([t.shape[0] for t in input_list])[dist.get_rank(group)])
        return None

    dist.all_to_all_single, dist.all_gather, dist.reduce_scatter = all_to_all_single, all_gather, reduce_scatter


def _patch_compile() -> None:
    """megatron's @jit_fuser is torch.compile: on a CPU it costs a C++ compilation per function and saves nothing."""
    torch.compiler.set_stance("force_eager")


GROUPS: dict[str, Callable[[], None]] = {
    "device": _patch_device,
    "streams": _patch_streams,
    "factories": _patch_factories,
    "random": _patch_random,
    "type_names": _patch_type_names,
    "collectives": _patch_collectives,
    "compile": _patch_compile,
}


def install() -> bool:
    """Apply every group once; returns whether this machine runs without CUDA. Call it before building a model."""
    if torch.cuda.is_available():
        return False
    if isinstance(torch.cuda.Stream, type) and issubclass(torch.cuda.Stream, _Stream):
        return True
    importlib.import_module("torch._dynamo")  # it lists torch's functions when imported: before they change
    for patch in GROUPS.values():
        patch()
    return True
