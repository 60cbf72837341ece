"""The hash behind seeded sampling, against MurmurHash3 as published."""

import importlib.util

import torch

from megatron_rl.rollout.sglang_cpu.settings import STUBS


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for a multiple of 4 bytes (Austin Appleby, public domain)."""
    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def load_stub() -> object:
    spec = importlib.util.spec_from_file_location("sgl_kernel_stub", STUBS / "sgl_kernel" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_hash_is_murmur3_and_missing_kernels_say_so() -> None:
    stub = load_stub()
    seeds, positions, columns = [0, 7, 2**62 + 12345], [0, 1, 1_000_000], [0, 1, 63]

    found = stub.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )

    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for j, column in enumerate(columns):
            data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert found[i, j] == murmur3(data)
    try:
        stub.silu_and_mul()
    except NotImplementedError as error:
        assert "sgl_kernel.silu_and_mul" in str(error)
    else:
        raise AssertionError("a missing kernel ran")
