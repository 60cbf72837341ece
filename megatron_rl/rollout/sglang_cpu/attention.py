"""Attention of SGLang's torch_native backend for whole batches; its own calls torch once a sequence and layer.

Sequences of like length share a call, padded to one rectangle. What these do not cover is left to SGLang's own.
"""

# B sequences of like length, L the longest, T new tokens of all sequences, n query heads, k key and value heads, d head
# dim; slots are places in the cache

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 64
"""Sequences up to this long share a call; beyond, a call spans a factor of two."""


def decode(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Around TorchNativeAttnBackend._run_sdpa_forward_decode: one new token a sequence. query and output [T, n, d]."""
    if encoder_lens is not None or options["sliding_window_size"] is not None or k_cache.dtype != query.dtype:
        arguments = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
        return original(backend, *arguments, **options)
    for chosen in _alike(seq_lens):
        slots_BL, is_real_BL = _slots(req_to_token, req_pool_indices[chosen], seq_lens[chosen])
        key, value = (cache[slots_BL].transpose(1, 2) for cache in (k_cache, v_cache))
        # The query heads of one key head are rows of one matrix: nothing is repeated for them.
        q_BkGd = query[chosen].unflatten(1, (key.shape[1], -1))
        mask = is_real_BL[:, None, None]
        output[chosen] = F.scaled_dot_product_attention(
            q_BkGd, key, value, attn_mask=mask, scale=options["scaling"]
        ).flatten(1, 2)
    return output


def extend(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Around TorchNativeAttnBackend._run_sdpa_forward_extend: the tokens of each sequence after its cached prefix."""
    is_plain = encoder_lens is None and options["sliding_window_size"] is None and options["causal"]
    if not is_plain or k_cache.dtype != query.dtype:
        lengths = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
        return original(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, *lengths, **options)
    first = extend_seq_lens.cumsum(0) - extend_seq_lens
    for chosen in _alike(seq_lens):
        slots_BL, is_real_BL = _slots(req_to_token, req_pool_indices[chosen], seq_lens[chosen])
        position_L = torch.arange(slots_BL.shape[1])
        prefix_B1 = extend_prefix_lens[chosen, None]
        is_new_BL = is_real_BL & (position_L >= prefix_B1)
        rows = (first[chosen, None] + position_L - prefix_B1)[is_new_BL]
        q_BLnd = query.new_zeros(*slots_BL.shape, *query.shape[1:])
        q_BLnd[is_new_BL] = query[rows]
        out_BnLd = F.scaled_dot_product_attention(
            q_BLnd.transpose(1, 2),
            k_cache[slots_BL].transpose(1, 2),
            v_cache[slots_BL].transpose(1, 2),
            is_causal=True,  # no query looks at the padding behind its sequence
            scale=options["scaling"],
            enable_gqa=options["enable_gqa"],
        )
        output[rows] = out_BnLd.transpose(1, 2)[is_new_BL]
    return output


def _alike(lengths: Tensor) -> Iterator[Tensor]:
    """Indices of sequences of like length."""
    classes = (lengths.clamp(min=SHORT) - 1).log2().floor()
    for one in classes.unique():
        yield (classes == one).nonzero()[:, 0]


def _slots(req_to_token: Tensor, requests_B: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [B, L] cache slots of the sequences, their first one where padded; and bool [B, L], not padded."""
    longest = int(lengths_B.max())
    slots_BL = req_to_token[requests_B, :longest].long()
    is_real_BL = torch.arange(longest) < lengths_B[:, None]
    return torch.where(is_real_BL, slots_BL, slots_BL[:, :1]), is_real_BL
