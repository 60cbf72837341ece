"""checksum_boxes in Triton: XXH3-128 of every chunk; what is left, a thousandth of the bytes, is the reference's.

A chunk is 16 blocks of 16 stripes of 8 words. Stripes of a block are only added up, so all are read at once; between
blocks the eight accumulators are scrambled. Source: XXH3_hashLong_128b of xxhash.h 0.8.3, github.com/Cyan4973/xxHash.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.errors import LayoutError
from megatron_rl_kernels import reference
from megatron_rl_kernels.boxes import one_device

NUM_WARPS = 1
CHUNK_BYTES = tl.constexpr(reference.CHUNK_BYTES)
BLOCK_WORDS = tl.constexpr(128)
BLOCKS = tl.constexpr(reference.CHUNK_BYTES // 1024)
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3_kSecret."""
PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
START = (PRIME32[2], *PRIME64[:4], PRIME32[1], PRIME64[4], PRIME32[0])
"""Of the eight accumulators."""
SCRAMBLE_PRIME = tl.constexpr(PRIME32[0])
LOW_START = tl.constexpr(reference.CHUNK_BYTES * PRIME64[0] % 2**64)
HIGH_START = tl.constexpr(2**64 - 1 - reference.CHUNK_BYTES * PRIME64[1] % 2**64)
AVALANCHE = tl.constexpr(0x165667919E3779F9)
STRIPES_KEY, LAST_KEY, SCRAMBLE_KEY, LOW_KEY, HIGH_KEY, START_KEY = (
    tl.constexpr(at) for at in (0, 128, 256, 264, 272, 280)
)
"""Where `keys` holds what words of a block, and of the last one, are xored with; of scrambling, of merging; START."""


@dataclass(frozen=True, slots=True)
class ChecksumTable:
    """The chunks of all buffers."""

    chunks: Tensor
    """int64 [chunks, 2]: address, bytes."""
    keys: Tensor
    """uint64 [288], what is derived from SECRET."""
    buffers: tuple[Tensor, ...]
    """Kept alive, for the table has their addresses."""


def _keys() -> np.ndarray:
    def words(at: int, count: int) -> np.ndarray:
        return np.frombuffer(SECRET, "<u8", count, at)

    stripes = [words(8 * stripe, 8) for stripe in range(16)]
    last = [*stripes[:15], words(192 - 64 - 7, 8)]
    merging = [words(192 - 64, 8), words(11, 8), words(192 - 64 - 11, 8)]
    return np.concatenate([*stripes, *last, *merging, np.array(START, np.uint64)])


def compile_checksum(buffers: Sequence[Tensor]) -> ChecksumTable:
    """Raises: LayoutError when a buffer is not contiguous, or does not begin at a multiple of 16 bytes."""
    device = one_device(buffers)
    chunks = [np.zeros((0, 2), np.int64)]
    for i, buffer in enumerate(buffers):
        reference.check_contiguous(buffer, i)
        if buffer.data_ptr() % 16:
            raise LayoutError(
                f"Buffer {i} begins {buffer.data_ptr() % 16} bytes after a multiple of 16: align buckets."
            )
        at = np.arange(0, buffer.nbytes, reference.CHUNK_BYTES)
        sizes = np.minimum(buffer.nbytes - at, reference.CHUNK_BYTES)
        chunks.append(np.stack([buffer.data_ptr() + at, sizes], axis=1))
    table = torch.from_numpy(np.concatenate(chunks)).to(device)
    keys = torch.from_numpy(_keys()).to(device)
    return ChecksumTable(table, keys, tuple(buffers))


@triton.jit
def _merge(sums, keys, start):
    """Products of neighbours, folded from 128 bits."""
    a, b = tl.split(tl.reshape(sums ^ tl.load(keys + tl.arange(0, 8)), [4, 2]))
    merged = tl.sum((a * b) ^ tl.umulhi(a, b), axis=0) + start
    merged = (merged ^ (merged >> 37)) * AVALANCHE
    return merged ^ (merged >> 32)


@triton.jit
def checksum_kernel(chunks, keys, digests):
    """A warp for each chunk, so that nothing waits for others. digests: uint64 [chunks, 2], high and low half."""
    chunk = tl.program_id(0).to(tl.int64)
    address = tl.load(chunks + chunk * 2).to(tl.pointer_type(tl.uint64), bitcast=True)
    size = tl.load(chunks + chunk * 2 + 1).to(tl.int32)
    words = size // 8
    odd = tl.load(address + words - 1, mask=words % 2 == 1, other=0)
    tail = odd * 0  # the bytes after the last whole word, as a word
    for i in tl.static_range(7):
        byte = (address + words).to(tl.pointer_type(tl.uint8), bitcast=True) + i
        tail |= tl.load(byte, mask=i < size % 8, other=0).to(tl.uint64) << (8 * i)
    word = tl.arange(0, BLOCK_WORDS)
    lane = tl.arange(0, 8)
    sums = tl.load(keys + START_KEY + lane)
    for block in tl.static_range(BLOCKS):  # unrolled: many loads are under way at once
        at = block * BLOCK_WORDS + word
        # Two words are one access and share a mask; the last of an odd number, and the tail, are put in afterwards.
        data = tl.load(tl.multiple_of(address + at, 16), mask=at // 2 < words // 2, other=0)
        data = tl.where((at == words - 1) & (words % 2 == 1), odd, data)
        data = tl.where(at == words, tail, data)
        keyed = data ^ tl.load(keys + (LAST_KEY if block == BLOCKS - 1 else STRIPES_KEY) + word)
        products = tl.sum(tl.reshape((keyed & 0xFFFFFFFF) * (keyed >> 32), [16, 8]), axis=0)
        even, uneven = tl.split(tl.reshape(tl.sum(tl.reshape(data, [16, 8]), axis=0), [4, 2]))
        sums += products + tl.reshape(tl.join(uneven, even), [8])
        if block < BLOCKS - 1:
            sums = (sums ^ (sums >> 47) ^ tl.load(keys + SCRAMBLE_KEY + lane)) * SCRAMBLE_PRIME
    tl.store(digests + chunk * 2, _merge(sums, keys + HIGH_KEY, HIGH_START))
    tl.store(digests + chunk * 2 + 1, _merge(sums, keys + LOW_KEY, LOW_START))


def launch(table: ChecksumTable) -> list[str]:
    """On the current stream, which it waits for."""
    count = len(table.chunks)
    digests = torch.empty((count, 2), dtype=torch.uint64, device=table.chunks.device)
    if count:
        checksum_kernel[(count,)](table.chunks, table.keys, digests, num_warps=NUM_WARPS)
    sizes = [buffer.nbytes for buffer in table.buffers]
    ends = np.cumsum([-(-size // reference.CHUNK_BYTES) for size in sizes])[:-1]
    parts = np.split(digests.cpu().numpy().astype(">u8"), ends)
    return [reference.digest_of_chunks(part.tobytes(), size) for part, size in zip(parts, sizes, strict=True)]


def prepare(buffers: Sequence[Tensor]) -> Callable[[], list[str]]:
    """The checksums, the table compiled."""
    return partial(launch, compile_checksum(buffers))
