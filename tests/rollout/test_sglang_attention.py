"""Batched attention of the CPU engine against one sequence and one head at a time, in float64."""

# R sequences, T new tokens, n query heads, k key heads, d head dim, e value dim

import pytest
import torch
from torch import Tensor

from megatron_rl.rollout.sglang_cpu import attention

SCALE = 0.3
LENGTHS = [5, 70, 130, 9, 64, 65]  # on both sides of the bounds between calls
PREFIXES = [0, 3, 128, 8, 0, 64]
SHAPES = {"grouped": (6, 2, 16, 16), "absorbed MLA": (4, 1, 24, 16), "multi-head": (3, 3, 8, 8)}  # n, k, d, e


def cache(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, the slots of each request, and the request of each sequence; unused slots hold nan."""
    _, k, d, e = shape
    slots = torch.randperm(sum(LENGTHS) + 40)[: sum(LENGTHS)].int()
    keys, values = (torch.full((sum(LENGTHS) + 40, k, size), torch.nan) for size in (d, e))
    keys[slots.long()], values[slots.long()] = torch.randn(len(slots), k, d), torch.randn(len(slots), k, e)
    requests = torch.randperm(len(LENGTHS) + 3)[: len(LENGTHS)]
    req_to_token = torch.zeros(len(LENGTHS) + 3, 200, dtype=torch.int32)
    for request, part in zip(requests, slots.split(LENGTHS), strict=True):
        req_to_token[request, : len(part)] = part
    return keys, values, req_to_token, requests


def expected(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *, position: int) -> Tensor:
    """[n, e]: what one token at `position` sees of its sequence."""
    seen = slots[: position + 1].long()
    out = []
    for head in range(len(query)):
        at = head // (len(query) // keys.shape[1])
        weights = (keys[seen, at].double() @ query[head].double() * SCALE).softmax(0)
        out.append(weights @ values[seen, at].double())
    return torch.stack(out)


def never(*_: object, **__: object) -> Tensor:
    raise AssertionError("left to SGLang")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode_attends_each_sequence_to_its_own_tokens(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    n, _, d, e = shape
    keys, values, req_to_token, requests = cache(shape)
    query, output = torch.randn(len(LENGTHS), n, d), torch.empty(len(LENGTHS), n, e)
    lengths = torch.tensor(LENGTHS)
    options = {"scaling": SCALE, "enable_gqa": True, "causal": False, "sliding_window_size": None}

    attention.decode(never, None, query, output, keys, values, req_to_token, requests, lengths, **options)

    for row, length in enumerate(LENGTHS):
        right = expected(query[row], keys, values, req_to_token[requests[row]], position=length - 1)
        torch.testing.assert_close(output[row].double(), right, rtol=0, atol=2e-6)  # float32 sums of at most 130


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_extend_attends_new_tokens_to_the_cached_prefix_and_to_earlier_ones(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    n, _, d, e = shape
    keys, values, req_to_token, requests = cache(shape)
    lengths, prefixes = torch.tensor(LENGTHS), torch.tensor(PREFIXES)
    new = lengths - prefixes
    query, output = torch.randn(int(new.sum()), n, d), torch.empty(int(new.sum()), n, e)
    options = {"scaling": SCALE, "enable_gqa": True, "causal": True, "sliding_window_size": None}

    attention.extend(
        never, None, query, output, keys, values, req_to_token, requests, lengths, prefixes, new, **options
    )

    places = [(i, p) for i in range(len(LENGTHS)) for p in range(PREFIXES[i], LENGTHS[i])]
    for row, (i, position) in enumerate(places):
        right = expected(query[row], keys, values, req_to_token[requests[i]], position=position)
        torch.testing.assert_close(output[row].double(), right, rtol=0, atol=2e-6)  # float32 sums of at most 130


def test_a_sliding_window_is_left_to_sglang() -> None:
    query = torch.zeros(1, 1, 4)
    options = {"scaling": 1.0, "enable_gqa": False, "causal": False, "sliding_window_size": 8}

    with pytest.raises(AssertionError, match="left to SGLang"):
        attention.decode(never, None, query, query, query, query, query, query, query, **options)
