"""What resharding does with weights, each operation on the device where the tensors lie.

On a GPU that is a kernel of `triton_ops`, else `reference`, which says what each computes. `prepare` does once what
depends on addresses and shapes alone. Importing this package imports no Triton.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_rl_kernels import reference
from megatron_rl_kernels.reference import Delta

__all__ = ["Delta", "apply_delta", "checksum_boxes", "copy_boxes", "delta_boxes", "prepare", "quantize_boxes"]
_KERNELS = {
    "copy_boxes": ("copy_boxes", "prepare"),
    "quantize_boxes": ("quantize_boxes", "prepare"),
    "checksum_boxes": ("checksum_boxes", "prepare"),
    "delta_boxes": ("delta_boxes", "prepare"),
    "apply_delta": ("delta_boxes", "prepare_apply"),
}
"""Module of triton_ops, and what in it prepares the operation."""


def _tensors(arguments: Any) -> Iterator[Tensor]:
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, Sequence):
        for each in arguments:
            yield from _tensors(each)


def prepare(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    """The operation on these tensors, to be called at every step. It keeps them alive.

    All arguments are given here, but for the delta of `apply_delta`, which is given to what is returned.
    """
    name = operation.__name__
    if any(t.is_cuda for t in _tensors(arguments)):
        module, function = _KERNELS[name]
        prepare_kernel: Callable[..., Callable[..., Any]] = getattr(
            import_module(f"{__name__}.triton_ops.{module}"), function
        )
        return prepare_kernel(*arguments, **options)
    if operation is copy_boxes:
        return reference.prepare_copy(*arguments)
    return partial(getattr(reference, name), *arguments, **options)


def copy_boxes(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """destinations[i][...] = sources[i]: views of equal shapes; see reference.copy_boxes."""
    prepare(copy_boxes, destinations, sources)()


def quantize_boxes(
    quantized: Sequence[Tensor],
    scales: Sequence[Tensor],
    sources: Sequence[Sequence[Tensor]],
    *,
    power_of_two: bool = False,
) -> None:
    """Quantize sources[i], views that are stacked, to e4m3 in blocks of 128 x 128; see reference.quantize_boxes."""
    prepare(quantize_boxes, quantized, scales, sources, power_of_two=power_of_two)()


def checksum_boxes(buffers: Sequence[Tensor]) -> list[str]:
    """32 hex digits for the bytes of each contiguous buffer; see reference.checksum_boxes."""
    digests: list[str] = prepare(checksum_boxes, buffers)()
    return digests


def delta_boxes(current: Sequence[Tensor], previous: Sequence[Tensor]) -> Delta:
    """The elements of `current` whose bits differ from `previous`; see reference.delta_boxes."""
    delta: Delta = prepare(delta_boxes, current, previous)()
    return delta


def apply_delta(destinations: Sequence[Tensor], delta: Delta) -> None:
    """Write the changed elements, and no others, over the previous version; see reference.apply_delta."""
    prepare(apply_delta, destinations)(delta)
