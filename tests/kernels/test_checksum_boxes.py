import pytest
import torch
import xxhash
from megatron_rl_kernels import checksum_boxes, reference
from torch import Tensor

from megatron_rl.errors import LayoutError

CHUNK = reference.CHUNK_BYTES


def buffer(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


def test_a_checksum_is_the_hash_of_the_hashes_of_its_chunks() -> None:
    content = bytes(buffer(CHUNK + 3).tolist())
    first, second = content[:CHUNK], content[CHUNK:] + bytes(CHUNK - 3)

    (found,) = checksum_boxes([torch.tensor(list(content), dtype=torch.uint8)])

    digests = xxhash.xxh3_128_digest(first) + xxhash.xxh3_128_digest(second)
    assert found == xxhash.xxh3_128_hexdigest(digests, seed=CHUNK + 3)


def test_bytes_count_and_not_shapes_or_dtypes() -> None:
    whole = buffer(6 * 64)

    found = checksum_boxes([whole, whole.view(torch.bfloat16), whole.view(torch.float32).view(6, 16)])

    assert len(set(found)) == 1


def test_no_flipped_bit_swapped_word_or_moved_block_is_overlooked() -> None:
    whole = buffer(3 * CHUNK + 40)
    words = whole.view(torch.int64)
    changed = [whole]
    for bit in range(0, whole.numel() * 8, 4099):
        changed.append(whole.clone())
        changed[-1][bit // 8] ^= 1 << bit % 8
    swaps = [(0, 1), (3, 3 + CHUNK // 8), (7, 7 + 8), (5, 5 + 128)]
    for a, b in swaps:
        changed.append(words.clone())
        changed[-1][[a, b]] = words[[b, a]]
    for size in (8, 64, 1024, CHUNK):
        changed += [whole.roll(size), whole[size:].contiguous(), torch.cat([whole[:size] * 0, whole[size:]])]
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in (0, 1, 8, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)]

    found = checksum_boxes(changed + zeros)

    assert len(set(found)) == len(changed) + len(zeros)


def test_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"Buffer 1 has shape \[2, 2\] and strides \[4, 1\]"):
        checksum_boxes([torch.zeros(2), torch.zeros(2, 4)[:, :2]])


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "sizes", [[0, 1, 7, 8, 9, 15, 16, 17, 24], [1023, 1024, 1025, CHUNK - 8], [CHUNK, CHUNK + 1, 2 * CHUNK + 1000]]
)
def test_the_kernel_equals_the_xxhash_library(sizes: list[int]) -> None:
    from megatron_rl_kernels.triton_ops import checksum_boxes as kernel

    buffers = [buffer(n) for n in sizes]

    found = kernel.prepare(buffers)()

    assert found == reference.checksum_boxes(buffers)


def test_the_kernel_refuses_a_buffer_that_is_not_aligned() -> None:
    from megatron_rl_kernels.triton_ops.checksum_boxes import compile_checksum

    with pytest.raises(LayoutError, match="Buffer 0 begins 4 bytes after a multiple of 16"):
        compile_checksum([torch.zeros(5)[1:]])
