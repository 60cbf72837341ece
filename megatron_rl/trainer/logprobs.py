"""Log-probability and entropy of tokens from logits whose vocabulary is cut over tensor-parallel ranks."""

# N tokens, V columns of the (padded) vocabulary on this rank

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, vocab_size: int, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        columns = logits_NV.shape[1]
        first = group.rank() * columns
        x_NV = logits_NV.float() / temperature
        # The padding's weights are trained noise, and the engine does not have them.
        x_NV[:, max(vocab_size - first, 0) :] = -torch.inf
        largest_N = x_NV.amax(1)
        if group.size() > 1:
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        x_NV -= largest_N[:, None]
        exp_NV = x_NV.exp()
        is_here_N = (targets_N >= first) & (targets_N < first + columns)
        column_N = torch.where(is_here_N, targets_N - first, 0)
        target_N = torch.where(is_here_N, x_NV.gather(1, column_N[:, None])[:, 0], 0.0)
        # exp is 0 where x is -inf, and their product must be 0 too.
        sums_3N = torch.stack([exp_NV.sum(1), target_N, (exp_NV * x_NV.clamp_(min=-1e30)).sum(1)])
        if group.size() > 1:
            dist.all_reduce(sums_3N, group=group)
        total_N, target_N, product_N = sums_3N
        lse_N = total_N.log()
        ctx.save_for_backward(exp_NV.div_(total_N[:, None]), column_N, is_here_N)
        ctx.temperature, ctx.dtype = temperature, logits_NV.dtype
        entropy_N = lse_N - product_N / total_N
        ctx.mark_non_differentiable(entropy_N)
        return target_N - lse_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        p_NV, column_N, is_here_N = ctx.saved_tensors
        grad_N = grad_N / ctx.temperature
        out_NV = p_NV * -grad_N[:, None]
        out_NV.scatter_add_(1, column_N[:, None], torch.where(is_here_N, grad_N, 0.0)[:, None])
        return out_NV.to(ctx.dtype), None, None, None, None


def token_logprobs(
    logits_NV: Tensor, targets_N: Tensor, *, vocab_size: int, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at each target, and the entropy of that distribution in nats.

    Args: logits_NV any float dtype, this rank's columns of the padded vocabulary; targets_N int64 token ids;
        vocab_size without padding; group the tensor-parallel process group.
    Returns: float32 [N] each, equal on all ranks of the group; the first carries a gradient to the logits.
    """
    return _TokenLogprobs.apply(logits_NV, targets_N, vocab_size, temperature, group)
