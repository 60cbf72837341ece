"""The table of quantize_boxes, which its Triton and its CUDA kernel share: a row for each tensor to be quantized."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_rl_kernels.boxes import Tiles, one_device, tiles_of
from megatron_rl_kernels.reference import check_quantize

FIRST_TILE = 11
"""Column of a row; all: first of its lines, rows and columns of the tensor; bytes from column to column in the source;
address of the quantized tensor and its two strides; address of the scales and their two strides; blocks from left to
right; first tile; four unused."""


@dataclass(frozen=True, slots=True)
class QuantizeTable:
    """Tensors that one kernel can take: of one source dtype, and all aligned or not."""

    tiles: Tiles
    lines: Tensor
    """int64: the address of each row of each source, wherever it lies: the gather."""
    dtype: torch.dtype
    """Of the sources."""
    aligned: bool
    """Whether lines begin at multiples of 16 bytes on both sides, are contiguous, and have a multiple of 16 columns."""
    power_of_two: bool
    tensors: tuple[Tensor, ...]
    """Kept alive, for the table has their addresses."""


def compile_quantize(
    quantized: Sequence[Tensor], scales: Sequence[Tensor], sources: Sequence[Sequence[Tensor]], *, power_of_two: bool
) -> list[QuantizeTable]:
    """As few tables as one kernel each can take. Raises: LayoutError as `reference.quantize_boxes`."""
    if not quantized:
        return []
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, (to, scale, parts) in enumerate(zip(quantized, scales, sources, strict=True)):
        check_quantize(to, scale, parts)
        if to.numel():
            groups.setdefault((parts[0].dtype, _is_aligned(to, parts)), []).append(i)
    tensors = (*quantized, *scales, *(part for parts in sources for part in parts))
    device = one_device(tensors)
    tables = []
    for (dtype, aligned), members in groups.items():
        rows, counts, lines, line = [], [], [], 0
        for i in members:
            to, scale, parts = quantized[i], scales[i], sources[i]
            size = parts[0].element_size()
            lines += [part.data_ptr() + np.arange(len(part), dtype=np.int64) * part.stride(0) * size for part in parts]
            head = [line, *to.shape, parts[0].stride(1) * size, to.data_ptr(), *to.stride()]
            rows.append([*head, scale.data_ptr(), *scale.stride(), scale.shape[1], 0, 0, 0, 0, 0])
            counts.append(scale.numel())
            line += len(to)
        tiles = tiles_of(rows, counts, device, first_tile=FIRST_TILE)
        addresses = torch.from_numpy(np.concatenate(lines)).to(device)
        tables.append(QuantizeTable(tiles, addresses, dtype, aligned, power_of_two, tensors))
    return tables


def preparing(launch: Callable[[Sequence[QuantizeTable]], None]) -> Callable[..., Callable[[], None]]:
    """`prepare` of the kernel that `launch` starts."""

    def prepare(
        quantized: Sequence[Tensor],
        scales: Sequence[Tensor],
        sources: Sequence[Sequence[Tensor]],
        *,
        power_of_two: bool = False,
    ) -> Callable[[], None]:
        """The quantization, its tables compiled."""
        return partial(launch, compile_quantize(quantized, scales, sources, power_of_two=power_of_two))

    return prepare


def _is_aligned(to: Tensor, parts: Sequence[Tensor]) -> bool:
    if to.shape[1] % 16 or to.stride(1) != 1 or to.data_ptr() % 16 or to.stride(0) % 16:
        return False
    return all(p.stride(1) == 1 and p.data_ptr() % 16 == 0 and p.stride(0) * p.element_size() % 16 == 0 for p in parts)
