"""Losses over the response tokens of one packed micro-batch.

A loss returns sums, never means: the trainer divides by the token count of the whole mini-batch, over all micro-batches
and data-parallel ranks, so a token weighs the same wherever it was packed.
"""

# N response tokens of a packed micro-batch

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.corrections import truncated_importance
from megatron_rl.algorithms.kl import MAX_LOG_RATIO, k3
from megatron_rl.config import AlgorithmConfig, OptimizerConfig


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may look at. Every tensor is float [N]; only `logprobs_N` carries a gradient."""

    logprobs_N: Tensor
    """Log-probability of each token under the weights being trained."""
    old_logprobs_N: Tensor
    """Under the trainer's weights that sampled, at the start of the batch; detached."""
    rollout_logprobs_N: Tensor
    """As the engine reported them."""
    reference_logprobs_N: Tensor | None
    """Under the frozen reference; None when kl_coef is 0."""
    entropy_N: Tensor
    """Entropy of the distribution each token was drawn from, in nats."""
    advantages_N: Tensor
    """The sample's advantage, repeated for each of its tokens."""


Loss = Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]


def clipped_token_loss(inputs: LossInputs, params: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate per token, plus kl_coef times k3 to the reference.

    loss = sum_N( -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef k3 ), r = exp(logprobs - old_logprobs),
    w = truncated_importance where importance_cap is set, else 1.
    Returns: (loss, sums), each a scalar summed over N; sums are detached. `kl` is to the reference, or, when there is
        none, to the policy that sampled. `clip_fraction` counts tokens whose gradient the clip has cut.
    Source: PPO, arXiv:1707.06347, eq. 7; unequal clips: DAPO, arXiv:2503.14476, eq. 10.
    """
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_N = ratio_N.clamp(1 - params.clip_low, 1 + params.clip_high)
    surrogate_N = torch.minimum(ratio_N * inputs.advantages_N, clipped_N * inputs.advantages_N)
    if params.importance_cap is not None:
        surrogate_N = surrogate_N * truncated_importance(
            inputs.old_logprobs_N, inputs.rollout_logprobs_N, cap=params.importance_cap
        )
    loss = -surrogate_N.sum()
    if inputs.reference_logprobs_N is None:
        # An empty micro-batch has nothing to compare, and so no reference either.
        assert params.kl_coef == 0 or not len(inputs.logprobs_N), (params.kl_coef, inputs.logprobs_N.shape)
        kl = k3(inputs.logprobs_N.detach(), inputs.rollout_logprobs_N).sum()
    else:
        kl = k3(inputs.logprobs_N, inputs.reference_logprobs_N).sum()
        loss = loss + params.kl_coef * kl
    with torch.no_grad():
        is_cut_N = clipped_N * inputs.advantages_N < ratio_N * inputs.advantages_N
        mismatch_N = (inputs.old_logprobs_N - inputs.rollout_logprobs_N).abs()
        sums = {
            "loss": loss.detach(),
            "kl": kl.detach(),
            "entropy": inputs.entropy_N.sum(),
            "ratio": ratio_N.sum(),
            "clip_fraction": is_cut_N.sum().to(ratio_N.dtype),
            "mismatch/logprob_abs_diff_mean": mismatch_N.sum(),
        }
    return loss, sums


def sft_loss(inputs: LossInputs, params: OptimizerConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the answer's tokens. Reads `logprobs_N` and `entropy_N` alone.

    Returns: (loss, sums), each a scalar summed over N; sums are detached.
    """
    loss = -inputs.logprobs_N.sum()
    return loss, {"loss": loss.detach(), "entropy": inputs.entropy_N.detach().sum()}
