"""Log-probability and entropy of tokens from logits whose vocabulary is cut over tensor-parallel ranks.

Logits are the largest tensor of the last pipeline stage. Beside them and their gradient, in the dtype they have,
nothing of their size is made: float32 copies are of `LOGITS_CHUNK` elements at a time, and the backward pass makes them
again.
"""

# T tokens of a micro-batch, N of them asked for, V columns of the (padded) vocabulary on this rank

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.memory import LOGITS_CHUNK


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        index_N: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        temperature: float,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        columns = logits_TV.shape[1]
        first = group.rank() * columns
        # The padding's weights are trained noise, and the engine does not have them.
        ctx.real, ctx.temperature = min(max(vocab_size - first, 0), columns), temperature
        largest_N = torch.full(index_N.shape, -torch.inf, device=logits_TV.device)
        if ctx.real:
            largest_N = logits_TV[:, : ctx.real].amax(1)[index_N].float() / temperature
        if group.size() > 1:
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        is_here_N = (targets_N >= first) & (targets_N < first + columns)
        column_N = torch.where(is_here_N, targets_N - first, 0)
        sums_3N = largest_N.new_empty(3, len(index_N))
        for part, x_nV in _chunks(ctx, logits_TV, index_N, largest_N):
            target_n = torch.where(is_here_N[part], x_nV.gather(1, column_N[part, None])[:, 0], 0.0)
            exp_nV = x_nV.exp()
            # exp is 0 where x is -inf, and their product must be 0 too.
            sums_3N[:, part] = torch.stack([exp_nV.sum(1), target_n, exp_nV.mul_(x_nV.clamp_(min=-1e30)).sum(1)])
        if group.size() > 1:
            dist.all_reduce(sums_3N, group=group)
        total_N, target_N, product_N = sums_3N
        lse_N = total_N.log()
        ctx.save_for_backward(logits_TV, index_N, largest_N, total_N, column_N, is_here_N)
        entropy_N = lse_N - product_N / total_N
        ctx.mark_non_differentiable(entropy_N)
        return target_N - lse_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, index_N, largest_N, total_N, column_N, is_here_N = ctx.saved_tensors
        grad_N = grad_N / ctx.temperature
        grad_TV = torch.zeros_like(logits_TV)
        for part, x_nV in _chunks(ctx, logits_TV, index_N, largest_N):
            out_nV = x_nV.exp_().div_(total_N[part, None]).mul_(-grad_N[part, None])
            out_nV.scatter_add_(1, column_N[part, None], torch.where(is_here_N[part], grad_N[part], 0.0)[:, None])
            grad_TV[index_N[part]] = out_nV.to(grad_TV.dtype)
        return grad_TV, None, None, None, None, None


def _chunks(ctx: Any, logits_TV: Tensor, index_N: Tensor, largest_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(tokens of N, their logits / temperature less the largest of the row): float32, -inf in the padding."""
    rows = max(LOGITS_CHUNK // logits_TV.shape[1], 1)
    for start in range(0, len(index_N), rows):
        part = slice(start, start + rows)
        x_nV = logits_TV[index_N[part]].float().div_(ctx.temperature)
        x_nV[:, ctx.real :] = -torch.inf
        yield part, x_nV.sub_(largest_N[part, None])


def token_logprobs(
    logits_TV: Tensor, index_N: Tensor, targets_N: Tensor, *, vocab_size: int, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at each target, and the entropy of that distribution in nats.

    Args: logits_TV any float dtype, this rank's columns of the padded vocabulary; index_N int64, the rows asked for,
        each once; targets_N int64 token ids; vocab_size without padding; group the tensor-parallel process group.
    Returns: float32 [N] each, equal on all ranks of the group; the first carries a gradient to the logits.
    """
    return _TokenLogprobs.apply(logits_TV, index_N, targets_N, vocab_size, temperature, group)
