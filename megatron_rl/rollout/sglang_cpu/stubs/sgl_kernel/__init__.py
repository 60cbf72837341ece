"""Stands in for SGLang's compiled kernels, which exist only for GPUs and AMX CPUs.

Modules that merely import names from it work; calling one says what is missing. The one kernel that the torch_native
path does call, the hash behind seeded sampling, is here in plain torch.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

_MASK = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "DEF")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs SGLang's compiled kernels, which this machine does not have."
        )

    missing.__name__ = name
    return missing


def _times(a: torch.Tensor, factor: int) -> torch.Tensor:
    """a * factor modulo 2**32, without overflowing int64."""
    low = (a & 0xFFFF) * factor
    high = ((a >> 16) * factor) & 0xFFFF
    return (low + (high << 16)) & _MASK


def _rotate_left(a: torch.Tensor, bits: int) -> torch.Tensor:
    return ((a << bits) | (a >> (32 - bits))) & _MASK


def _mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = _times(_rotate_left(_times(k, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotate_left(h ^ k, 13), 5) + 0xE6546B64) & _MASK


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of the 16 bytes (seed as uint64, position as uint32, column as uint32).

    Equal to SGLang's Triton kernel in sglang/kernels/ops/sampling/murmur_hash.py.
    Returns: int64 [len(seed), len(col_indices)] in [0, 2**32).
    """
    seed = seed.view(torch.int64)
    h = _mix(torch.zeros_like(seed), seed & _MASK)
    h = _mix(h, (seed >> 32) & _MASK)
    h = _mix(h, positions.to(torch.int64) & _MASK)
    h = _mix(h[:, None], col_indices.to(torch.int64)[None, :] & _MASK) ^ 16
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    return h ^ (h >> 16)


_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
