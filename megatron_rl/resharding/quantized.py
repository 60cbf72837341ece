"""Where FP8 is made: by the senders where each block lies in one rectangle of one of them, else by the readers."""

from collections.abc import Collection
from dataclasses import replace

from megatron_rl.layouts.fp8 import BLOCK, DTYPE
from megatron_rl.resharding.tables import Layouts, distinct


def cut_within_blocks(sources: Layouts) -> set[str]:
    """HF tensors that some rectangle of `sources` begins or ends within a block of 128 x 128."""
    boxes = {(b.hf, b.hf_offset, b.shape) for t in distinct(sources) for b in t.boxes}
    spans = [(hf, start, tuple(o + n for o, n in zip(start, shape, strict=True))) for hf, start, shape in boxes]
    whole: dict[str, tuple[int, ...]] = {}
    for hf, _, end in spans:
        whole[hf] = tuple(map(max, whole.get(hf, end), end))
    return {
        hf
        for hf, start, end in spans
        if any(o % BLOCK for o in start) or any(e % BLOCK and e != n for e, n in zip(end, whole[hf], strict=True))
    }


def in_full(targets: Layouts, torn: Collection[str], dtype: str) -> tuple[Layouts, set[str]]:
    """`targets` with `dtype` instead of FP8 for tensors that hold one of the HF tensors `torn`, or share one with such.

    Returns: them, and all HF tensors that they hold.
    """
    quantized = [t for t in distinct(targets) if t.dtype == DTYPE]
    names = {b.hf for t in quantized if any(b.hf in torn for b in t.boxes) for b in t.boxes}
    made = {id(t): replace(t, dtype=dtype) for t in quantized if any(b.hf in names for b in t.boxes)}
    together = {b.hf for t in made.values() for b in t.boxes}
    assert together == names, together ^ names
    return {rank: [made.get(id(t), t) for t in own] for rank, own in targets.items()}, names
