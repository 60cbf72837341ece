"""Cut the samples of one step into mini-batches and token-budget micro-batches, balanced over data-parallel ranks."""

import heapq
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.types import Batch, Sample


class Packer(Protocol):
    """`make_batch` with the run's sizes filled in."""

    def __call__(self, samples: Sequence[Sample], *, mini_batches: int) -> Batch:
        """Schedule every sample exactly once."""
        ...


def make_batch(
    samples: Sequence[Sample],
    *,
    dp: int,
    mini_batches: int,
    tokens_per_micro_batch: int,
    cp: int = 1,
    micro_batches_multiple: int = 1,
) -> Batch:
    """Schedule every sample exactly once, the same way for the same samples.

    Mini-batches are runs of consecutive samples, so groups stay together, and differ by at most one sample. Within one,
    ranks differ by at most the longest sample's tokens, and so do micro-batches of the same position: with expert
    parallelism the ranks wait for one another in each. All ranks have equally many micro-batches, a multiple of
    `micro_batches_multiple` (the pipeline size, for the interleaved schedule).

    A micro-batch may be empty, but only where samples are so long that the equal count needs more micro-batches than
    there are samples.
    Args: tokens_per_micro_batch counts prompt and response tokens on one of `cp` context-parallel ranks, which share a
        micro-batch; none holds more.
    Raises: DataError for no samples, or one without a response; ConfigError for a sample longer than a micro-batch,
        and for fewer samples than ranks times mini-batches.
    """
    _check(samples, dp=dp, mini_batches=mini_batches, tokens_per_micro_batch=tokens_per_micro_batch, cp=cp)
    lengths = [s.prompt_tokens + s.response_tokens for s in samples]
    bounds = [len(samples) * k // mini_batches for k in range(mini_batches + 1)]
    schedule = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        bins = _pack(range(start, end), lengths, tokens_per_micro_batch * cp, multiple=dp * micro_batches_multiple)
        schedule.append(_deal(bins, lengths, dp))
    return Batch(samples=tuple(samples), schedule=tuple(schedule))


def _check(samples: Sequence[Sample], *, dp: int, mini_batches: int, tokens_per_micro_batch: int, cp: int) -> None:
    if not samples:
        raise DataError(
            "No samples to train on: the step's batch is empty. Either nothing was generated or the recipe dropped "
            "every group; look at samples.jsonl."
        )
    for i, s in enumerate(samples):
        where = f"Sample {i} (prompt {s.prompt_id}, group {s.group})"
        if s.response_tokens < 1:
            raise DataError(
                f"{where} has no response tokens, so there is nothing to train on. Drop it from the samples."
            )
        tokens = s.prompt_tokens + s.response_tokens
        if tokens > tokens_per_micro_batch * cp:
            raise ConfigError(
                f"{where} has {s.prompt_tokens} + {s.response_tokens} tokens, more than a micro-batch of "
                f"trainer.tokens_per_micro_batch={tokens_per_micro_batch} on each of {cp} context-parallel rank(s), "
                f"and a sample is never cut. Raise it to at least {-(-tokens // cp)}, or lower sampling.max_tokens."
            )
    if len(samples) < dp * mini_batches:
        raise ConfigError(
            f"{len(samples)} samples cannot fill {mini_batches} mini-batch(es) on {dp} data-parallel ranks: a rank "
            "would have nothing to do. Raise prompts_per_step or sampling.samples_per_prompt, or lower "
            "algorithm.mini_batches."
        )


def _pack(indices: Sequence[int], lengths: Sequence[int], budget: int, *, multiple: int) -> list[list[int]]:
    """Bins of at most `budget` tokens, as few as a greedy fill finds, their number a multiple of `multiple`."""
    total = sum(lengths[i] for i in indices)
    longest_first = sorted(indices, key=lambda i: (-lengths[i], i))
    count = _round_up(-(-total // budget), multiple)
    while (bins := _fill(longest_first, lengths, budget, count=count)) is None:
        count += multiple  # ends at one sample a bin, which fits
    return bins


def _fill(longest_first: Sequence[int], lengths: Sequence[int], budget: int, *, count: int) -> list[list[int]] | None:
    """Each sample into the emptiest of `count` bins; None when one overflows.

    The fullest and the emptiest bin then differ by at most the longest sample: the fullest was the emptiest before its
    last sample came.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]  # (tokens, bin)
    for i in longest_first:
        tokens, b = heap[0]
        if tokens + lengths[i] > budget:
            return None
        bins[b].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], b))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], dp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[dp_rank][micro_batch]: bins from full to empty, dealt to the ranks in alternating direction."""
    loads = [sum(lengths[i] for i in b) for b in bins]
    fullest_first = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp)]
    for position in range(0, len(bins), dp):
        row = fullest_first[position : position + dp]
        if position // dp % 2:
            row.reverse()
        for rank, b in enumerate(row):
            ranks[rank].append(tuple(sorted(bins[b])))
    return tuple(tuple(rank) for rank in ranks)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
