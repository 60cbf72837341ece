"""Packed attention and rotary embedding against one sequence at a time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_rl.trainer.attention import SdpaAttention, local_positions, pack, rotary_thd

LENGTHS = [4, 200, 64, 8, 72]  # three buckets, out of order
HEADS, GROUPS, DIM = 6, 2, 8


def group(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def attention() -> SdpaAttention:
    config = SimpleNamespace(window_size=None, softmax_type="vanilla", attention_dropout=0.0, kv_channels=DIM)
    return SdpaAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=group()))


def test_packed_attention_is_causal_attention_of_each_sequence() -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query = torch.randn(total, HEADS, DIM, requires_grad=True)
    key, value = (torch.randn(total, GROUPS, DIM, requires_grad=True) for _ in range(2))
    weight = torch.randn(total, HEADS * DIM)

    found = attention()(query, key, value, None, packed_seq_params=pack(LENGTHS))
    gradients = torch.autograd.grad((found * weight).sum(), (query, key, value))

    expected = []
    for q, k, v in zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True):
        k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    want = torch.cat(expected)
    torch.testing.assert_close(found, want, atol=2e-6, rtol=0)  # float32, another order of sums
    for a, b in zip(gradients, torch.autograd.grad((want * weight).sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_context_parallel_ranks_hold_two_mirrored_chunks_of_each_sequence(cp: int) -> None:
    lengths = [2 * cp * n for n in (1, 3, 2)]
    held = [local_positions(torch.tensor(lengths), cp, rank).split([n // cp for n in lengths]) for rank in range(cp)]
    for i, n in enumerate(lengths):
        chunk = n // (2 * cp)
        for rank in range(cp):
            mirrored = 2 * cp - 1 - rank
            expected = [*range(rank * chunk, (rank + 1) * chunk)]
            if cp > 1:
                expected += range(mirrored * chunk, (mirrored + 1) * chunk)
            else:
                expected = list(range(n))
            assert held[rank][i].tolist() == expected


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("mla", [False, True])
def test_rotary_in_one_piece_equals_megatrons_own_loop(cp: int, mla: bool) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 4, 16, 24], dtype=torch.int32)
    freqs = torch.randn(12, 1, 1, DIM)
    for rank in range(cp):
        t = torch.randn(24 // cp, HEADS, DIM + 4)
        arguments = {"mla_rotary_interleaved": mla, "mscale": 1.3, "cp_group": group(rank, cp)}
        torch.testing.assert_close(
            rotary_thd(t, bounds, freqs, **arguments),
            rope_utils._apply_rotary_pos_emb_thd(t, bounds, freqs, **arguments),
            atol=0,
            rtol=0,
        )


def test_padding_of_a_bucket_never_reaches_a_result() -> None:
    """Padded places repeat row 0: a value there must change nothing but row 0's own sequence."""
    torch.manual_seed(1)
    lengths = [3, 60]
    query, key, value = (torch.randn(63, HEADS, DIM) for _ in range(3))
    first = attention()(query, key, value, None, packed_seq_params=pack(lengths))
    value[0] += 100.0
    second = attention()(query, key, value, None, packed_seq_params=pack(lengths))
    assert not torch.equal(first[:3], second[:3])
    assert torch.equal(first[3:], second[3:])
