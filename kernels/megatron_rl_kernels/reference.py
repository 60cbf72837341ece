"""What each operation computes, in torch and numpy: what kernels are tested against, and what runs on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from megatron_rl.errors import LayoutError
from megatron_rl_kernels.boxes import check_pairs

BLOCK = 128
"""Rows and columns that share a scale in quantize_boxes."""
LARGEST_E4M3 = 448.0
CHUNK_BYTES = 16384
"""Of a buffer, that checksum_boxes hashes by itself, in parallel with the others."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtype by bytes: comparing as integers tells -0.0 from 0.0, and finds a NaN equal to itself."""


def copy_boxes(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """destinations[i][...] = sources[i], for every i: views of any strides, equal shapes; dtypes may differ.

    float32 becomes bfloat16 by rounding to nearest, ties to even; a NaN stays one, with other bits.
    Raises: LayoutError when the shapes of a pair differ. Destinations must not overlap; nothing checks that here.
    """
    prepare_copy(destinations, sources)()


@torch.no_grad()
def prepare_copy(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
    """The copy, to be called at every step: equal dtypes through numpy, whose runs of bytes are moved by memmove.

    On recent CPUs that does not read what it writes over, as torch's loop does: less traffic by a third.
    """
    if not destinations:
        return lambda: None
    check_pairs(destinations, sources)
    pairs = list(zip(destinations, sources, strict=True))
    moved = [(_bits(to), _bits(of)) for to, of in pairs if to.dtype == of.dtype]
    cast = [(to.detach(), of.detach()) for to, of in pairs if to.dtype != of.dtype]

    def copy() -> None:
        for into, bits in moved:
            np.copyto(into, bits)
        for to, of in cast:
            to.copy_(of)

    return copy


def _bits(tensor: Tensor) -> np.ndarray:
    """Integers: numpy knows neither bfloat16 nor e4m3."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).numpy()


def check_quantize(quantized: Tensor, scale: Tensor, parts: Sequence[Tensor]) -> None:
    """Raises: LayoutError when shapes or dtypes are not those that `quantize_boxes` takes."""
    shape = tuple(quantized.shape)
    found = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in (quantized, scale, *parts)]
    fits = (
        (len(shape) == 2 and quantized.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32)
        and tuple(scale.shape) == tuple(-(-n // BLOCK) for n in shape)
        and sum(len(p) for p in parts) == shape[0]
        and all(p.dim() == 2 and p.shape[1] == shape[1] and p.dtype == parts[0].dtype for p in parts)
        and (not parts or parts[0].dtype in (torch.bfloat16, torch.float16, torch.float32))
    )
    if not fits:
        raise LayoutError(
            f"quantize_boxes got {found}: it needs float8_e4m3fn [m, n], float32 scales of its blocks of {BLOCK} x "
            f"{BLOCK}, and sources of one floating dtype that stacked are [m, n]. Cut the plan's rectangles that way."
        )


@torch.no_grad()
def quantize_boxes(
    quantized: Sequence[Tensor],
    scales: Sequence[Tensor],
    sources: Sequence[Sequence[Tensor]],
    *,
    power_of_two: bool = False,
) -> None:
    """Quantize sources[i], views that stacked are [m, n], to e4m3 with one scale for each block of 128 x 128.

    quantized[i]: float8_e4m3fn [m, n], scales[i]: float32 [ceil(m / 128), ceil(n / 128)]; views of any strides.
    scale = amax / 448 and quantized = source / scale, both by IEEE division, then to nearest, ties to even. The scale
    is 1 for a block of zeros, at least the smallest normal float32 (a subnormal could round to 0), and with
    `power_of_two` rounded up to one. A NaN or an infinity in a block makes all of it NaN when dequantized.
    Source of the format: inference/kernel.py and fp8_cast_bf16.py of the DeepSeek-V3 repository; powers of two (UE8M0)
    are DeepSeek-V3.1's.
    Raises: LayoutError for other shapes or dtypes.
    """
    for to, scale, parts in zip(quantized, scales, sources, strict=True):
        check_quantize(to, scale, parts)
        if not to.numel():
            continue
        (rows, columns), (high, wide) = to.shape, scale.shape
        padded = parts[0].new_zeros(high * BLOCK, wide * BLOCK, dtype=torch.float32)
        at = 0
        for part in parts:
            padded[at : at + len(part), :columns] = part
            at += len(part)
        blocks = padded.view(high, BLOCK, wide, BLOCK)
        factor = _scale(blocks.abs().amax(dim=(1, 3)), power_of_two=power_of_two)
        blocks /= factor[:, None, :, None]
        if not factor.isfinite().all():
            padded.masked_fill_(padded.isnan(), torch.nan)  # of one sign: e4m3 has two NaNs
        to.copy_(padded[:rows, :columns].to(torch.float8_e4m3fn))
        scale.copy_(factor)


def _scale(largest: Tensor, *, power_of_two: bool) -> Tensor:
    scale = (largest / LARGEST_E4M3).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.where(largest == 0, 1.0, scale).masked_fill(largest.isnan(), torch.nan)
    if not power_of_two:
        return scale
    up = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale.isnan(), scale, up)


def checksum_boxes(buffers: Sequence[Tensor]) -> list[str]:
    """32 hex digits for the bytes of each contiguous buffer: a two-level XXH3-128.

    Chunks of 16 KiB, the last filled up with zeros, are hashed in any order; their digests, one after the other, are
    hashed again with the number of bytes as seed. A change of content, order or length goes unnoticed with a chance of
    about 2^-128: XXH3 is a published hash that passes SMHasher. Nothing is proved, since it is not a code: a change
    within one word of 8 bytes always changes what it adds up, and only the last mixing could hide it again.
    Raises: LayoutError when a buffer is not contiguous.
    """
    return [_checksum(buffer, i) for i, buffer in enumerate(buffers)]


def check_contiguous(buffer: Tensor, i: int) -> None:
    """Raises: LayoutError."""
    if not buffer.is_contiguous():
        raise LayoutError(
            f"Buffer {i} has shape {list(buffer.shape)} and strides {list(buffer.stride())}: a checksum is of "
            "contiguous bytes. Pack it with copy_boxes first."
        )


def _checksum(buffer: Tensor, i: int) -> str:
    check_contiguous(buffer, i)
    content = memoryview(buffer.detach().flatten().view(torch.uint8).numpy())
    whole = len(content) // CHUNK_BYTES * CHUNK_BYTES
    digests = [xxhash.xxh3_128_digest(content[at : at + CHUNK_BYTES]) for at in range(0, whole, CHUNK_BYTES)]
    if whole < len(content):
        digests.append(xxhash.xxh3_128_digest(bytes(content[whole:]).ljust(CHUNK_BYTES, b"\0")))
    return digest_of_chunks(b"".join(digests), len(content))


def digest_of_chunks(digests: bytes, nbytes: int) -> str:
    """The second level: of the digests of a buffer's chunks, 16 bytes each."""
    return xxhash.xxh3_128_hexdigest(digests, seed=nbytes)


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed in many tensors of one dtype, in their order and in the order of their elements."""

    counts: Tensor
    """int64 [tensors], on the CPU."""
    indices: Tensor
    """int32 [sum of counts]: of an element in its own tensor, row-major; on the tensors' device, as the values."""
    values: Tensor
    """[sum of counts]."""


@torch.no_grad()
def delta_boxes(current: Sequence[Tensor], previous: Sequence[Tensor]) -> Delta:
    """The elements of `current` whose bits differ from `previous`: -0.0 is not 0.0, a NaN equals its copy.

    Views of any strides, equal shapes, one dtype.
    Raises: LayoutError for other shapes, several devices or dtypes, no tensors.
    """
    dtype, integer = check_delta(current, previous)
    found, values = [], []
    for new, old in zip(current, previous, strict=True):
        bits, were = (t.contiguous().view(integer).flatten() for t in (new, old))
        at = torch.from_numpy(np.flatnonzero(bits.numpy() != were.numpy()))  # four times as fast as torch's
        found.append(at.to(torch.int32))
        values.append(bits[at])
    counts = torch.tensor([len(at) for at in found], dtype=torch.int64)
    return Delta(counts, torch.cat(found), torch.cat(values).view(dtype))


@torch.no_grad()
def apply_delta(destinations: Sequence[Tensor], delta: Delta) -> None:
    """Write the changed elements, and no others, into views of any strides that hold the previous version.

    Raises: LayoutError when `delta` is of another number of tensors or another dtype.
    """
    check_apply(destinations, delta)
    counts = delta.counts.tolist()
    integer = INTEGERS[delta.values.element_size()]
    indices, bits_of_all = torch.split(delta.indices, counts), torch.split(delta.values.view(integer), counts)
    for destination, at, values in zip(destinations, indices, bits_of_all, strict=True):
        bits = destination.view(integer)
        if bits.is_contiguous():
            bits.view(-1)[at.long()] = values
        elif len(at):
            bits[torch.unravel_index(at.long(), bits.shape)] = values


def check_delta(current: Sequence[Tensor], previous: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """Their dtype, and the integers of its size. Raises: LayoutError as `delta_boxes`."""
    check_pairs(current, previous)
    dtypes = {t.dtype for t in [*current, *previous]}
    if len(dtypes) != 1:
        raise LayoutError(
            f"A delta of {sorted(map(str, dtypes))}: it has values of one dtype. Make one for each dtype."
        )
    return current[0].dtype, INTEGERS[current[0].element_size()]


def check_apply(destinations: Sequence[Tensor], delta: Delta) -> None:
    """Raises: LayoutError as `apply_delta`."""
    dtypes = {t.dtype for t in destinations} | {delta.values.dtype}
    if len(destinations) != len(delta.counts) or len(dtypes) != 1:
        raise LayoutError(
            f"A delta of {len(delta.counts)} tensors of {delta.values.dtype} for {len(destinations)} of "
            f"{sorted({str(t.dtype) for t in destinations})}: it was made for others. Send the full version."
        )
