"""Packs samples into the tensors of one micro-batch, as one rank of a context-parallel group sees it."""

# T packed tokens of this rank, N response tokens predicted at them

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.trainer.attention import PackedSequences, local_positions, pack


@dataclass(frozen=True, slots=True)
class Row:
    """One sample."""

    tokens: np.ndarray
    """int [length]: prompt, then response."""
    prompt_length: int
    values: dict[str, np.ndarray]
    """Name -> float32 [response tokens]; every row of a micro-batch has the same names."""

    @property
    def responses(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Alignment:
    """What a packed length must obey."""

    cp: int = 1
    cp_rank: int = 0
    tp: int = 1
    """Tensor-parallel size under sequence parallelism, else 1."""

    @property
    def sequence(self) -> int:
        """Divides each sequence: two chunks for every context-parallel rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def total(self) -> int:
        """Divides the sum."""
        return math.lcm(self.sequence, self.cp * self.tp)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a forward pass and a loss read."""

    tokens_1T: Tensor
    positions_1T: Tensor
    sequences: PackedSequences
    index_N: Tensor
    """int64: where in T each response token is predicted, one place before it."""
    targets_N: Tensor
    places_N: Tensor
    """int64: which of the micro-batch's response tokens, over all context-parallel ranks, in order of the rows."""
    values: dict[str, Tensor]
    """Name -> float32 [N]."""
    responses: int
    """Response tokens over all context-parallel ranks."""


def padded_length(rows: Sequence[Row], align: Alignment) -> int:
    """Tokens of a micro-batch over all context-parallel ranks, padding included; at least one alignment."""
    total = sum(_up(len(row.tokens), align.sequence) for row in rows)
    return _up(max(total, 1), align.total)


def build(rows: Sequence[Row], align: Alignment, *, length: int, device: torch.device) -> MicroBatch:
    """Pack `rows`, and sequences of padding behind them, into `length` tokens. Rows may be empty."""
    lengths = [_up(len(row.tokens), align.sequence) for row in rows]
    longest = max(lengths, default=align.total)
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, longest))
    assert sum(lengths) == length, (lengths, length)
    tokens, places = np.zeros(length, np.int64), np.full(length, -1, np.int64)
    targets = np.zeros(length, np.int64)
    start = done = 0
    for row, padded in zip(rows, lengths, strict=False):
        assert 0 < row.prompt_length < len(row.tokens), (row.prompt_length, len(row.tokens))
        end = start + len(row.tokens)
        tokens[start:end] = row.tokens
        predicting = slice(start + row.prompt_length - 1, end - 1)
        targets[predicting] = row.tokens[row.prompt_length :]
        places[predicting] = np.arange(done, done + row.responses)
        start, done = start + padded, done + row.responses
    lengths_S = torch.tensor(lengths)
    position_T = local_positions(lengths_S, align.cp, align.cp_rank)
    begins_S = lengths_S.cumsum(0) - lengths_S
    here_T = position_T + begins_S.repeat_interleave(lengths_S // align.cp)
    places_T = torch.from_numpy(places)[here_T]
    index_N = (places_T >= 0).nonzero()[:, 0]
    places_N = places_T[index_N]
    names = rows[0].values if rows else {}
    values = {name: torch.from_numpy(np.concatenate([row.values[name] for row in rows]))[places_N] for name in names}
    return MicroBatch(
        tokens_1T=torch.from_numpy(tokens)[here_T][None].to(device),
        positions_1T=position_T[None].to(device),
        sequences=pack(lengths, cp=align.cp, cp_rank=align.cp_rank, device=device),
        index_N=index_N.to(device),
        targets_N=torch.from_numpy(targets)[here_T][index_N].to(device),
        places_N=places_N,
        values={name: value.to(device) for name, value in values.items()},
        responses=done,
    )


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
