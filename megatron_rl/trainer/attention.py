"""Attention over packed sequences in plain PyTorch, and rotary embedding for all of them at once.

Sequences lie one after another (thd). Under context parallelism rank r of c holds chunks r and 2c-1-r of each sequence,
which is cut into 2c equal chunks.
"""

# B sequences of a bucket, L the longest of them, T packed tokens of this rank, n heads, d head dim

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

CPU = torch.device("cpu")
SHORT = 64
"""Sequences up to this long share a bucket; beyond, a bucket spans a factor of two."""


@dataclass
class Bucket:
    """Sequences of like length, padded to one rectangle."""

    queries_BL: Tensor
    """int64 [B, L]: where each query lies in this rank's packed tokens; 0 where padded."""
    keys_BL: Tensor
    """int64 [B, L']: where each key lies in the packed tokens of all context-parallel ranks, end to end; or 0."""
    real_BL: Tensor
    """bool [B, L]: not padding."""
    mask: Tensor | None
    """bool [B, 1, L, L'], true where a query may look; None for the plain causal triangle."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Packed sequences with what the attention here needs to know of them."""

    lengths: tuple[int, ...] = ()
    """Padded, of the whole sequences."""
    cp: int = 1
    cp_rank: int = 0

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The same for every layer of a micro-batch."""
        lengths = torch.tensor(self.lengths)
        classes = (lengths.clamp(min=SHORT) - 1).log2().floor()
        return tuple(_bucket(lengths, classes == c, self.cp, self.cp_rank) for c in classes.unique())


def local_positions(lengths: Tensor, cp: int, rank: int) -> Tensor:
    """Position within its sequence of each token that context-parallel rank `rank` holds: int64 [sum(lengths) / cp].

    Args: lengths int64 [sequences], each divisible by 2 * cp when cp > 1.
    """
    local = lengths // cp
    starts = local.cumsum(0) - local
    offset = torch.arange(int(local.sum()), device=lengths.device) - starts.repeat_interleave(local)
    if cp == 1:
        return offset
    half = (local // 2).repeat_interleave(local)
    return torch.where(offset < half, offset + rank * half, offset + (2 * cp - 2 - rank) * half)


def pack(lengths: Sequence[int], *, cp: int = 1, cp_rank: int = 0, device: torch.device = CPU) -> PackedSequences:
    """Describe sequences of `lengths`, padded, to megatron and to the attention here."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        cp=cp,
        cp_rank=cp_rank,
    )


def _bucket(lengths: Tensor, chosen: Tensor, cp: int, rank: int) -> Bucket:
    local = lengths // cp
    starts = (local.cumsum(0) - local)[chosen]
    local = local[chosen]
    steps = torch.arange(int(local.max()), device=lengths.device)
    real = steps < local[:, None]
    queries = torch.where(real, starts[:, None] + steps, 0)
    if cp == 1:
        return Bucket(queries, queries, real, None)
    total = int(lengths.sum()) // cp
    # Keys stay in the order of the ranks that hold them; the mask knows their positions.
    keys = torch.cat([torch.where(real, queries + r * total, 0) for r in range(cp)], 1)
    half = (local // 2)[:, None]
    position = [torch.where(steps < half, steps + r * half, steps + (2 * cp - 2 - r) * half) for r in range(cp)]
    unseen = 2 * int(lengths.max())
    key_position = torch.cat([torch.where(real, p, unseen) for p in position], 1)
    # A padded query looks at everything: an empty row of a softmax is not a number.
    mask = (position[rank][:, :, None] >= key_position[:, None, :]) | ~real[:, :, None]
    return Bucket(queries, keys, real, mask[:, None])


class _Pad(torch.autograd.Function):
    """[T, n, d] -> [B, n, L, d]. Padding repeats row 0, whose gradient from there is exactly zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index_BL: Tensor, real_BL: Tensor) -> Tensor:
        ctx.save_for_backward(index_BL, real_BL)
        ctx.rows = x.shape[0]
        return x.index_select(0, index_BL.flatten()).unflatten(0, index_BL.shape).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index_BL, real_BL = ctx.saved_tensors
        out = grad.new_zeros(ctx.rows, grad.shape[1], grad.shape[3])
        out.index_copy_(0, index_BL[real_BL], grad.transpose(1, 2)[real_BL])
        return out, None, None


class _Gather(torch.autograd.Function):
    """[T, ...] of each rank -> [cp * T, ...]; backward sums every rank's gradient of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class SdpaAttention(MegatronModule):
    """Causal attention of packed sequences with torch's scaled_dot_product_attention; MLA, GQA and CP included."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: Any = None,
        **_: Any,
    ):
        super().__init__(config=config)
        assert attention_type == "self" and config.window_size is None and config.softmax_type == "vanilla"
        assert config.attention_dropout == 0.0, config.attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Args: query [T, n, d], key and value [T, n or its groups, d]. Returns: [T, n * d]."""
        assert isinstance(packed_seq_params, PackedSequences), "this trainer packs every batch"
        if self.cp_group.size() > 1:
            key, value = _Gather.apply(key, self.cp_group), _Gather.apply(value, self.cp_group)
        outs, rows = [], []
        for bucket in packed_seq_params.buckets:
            real_keys = bucket.real_BL.repeat(1, self.cp_group.size())
            out = F.scaled_dot_product_attention(
                _Pad.apply(query, bucket.queries_BL, bucket.real_BL),
                _Pad.apply(key, bucket.keys_BL, real_keys),
                _Pad.apply(value, bucket.keys_BL, real_keys),
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outs.append(out.transpose(1, 2)[bucket.real_BL])
            rows.append(bucket.queries_BL[bucket.real_BL])
        if len(outs) == 1:  # in order already
            return outs[0].flatten(1)
        return torch.cat(outs)[torch.cat(rows).argsort()].flatten(1)


def rotary_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    **_: Any,
) -> Tensor:
    """megatron's rotary embedding of packed t [T, n, d], in one piece; the stock one loops over the sequences."""
    position_T = local_positions(cu_seqlens.diff().long(), cp_group.size(), cp_group.rank())
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs[position_T],
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
    ).squeeze(1)


def install() -> None:
    """Let megatron use `rotary_thd`."""
    rope_utils._apply_rotary_pos_emb_thd = rotary_thd
