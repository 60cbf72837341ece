"""The per-token estimator of KL(policy || reference) from the log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html
"""

# N response tokens of a packed micro-batch

import torch
from torch import Tensor

# exp(20) = 5e8: a log-ratio beyond it says "the policies disagree wholly"; exp of it overflows and its gradient is NaN.
MAX_LOG_RATIO = 20.0


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, low variance, never negative.

    The exponent is held at MAX_LOG_RATIO; beyond it the estimate still grows, linearly, and stays finite.
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    # expm1: q/p - 1 loses all its digits in float32 when the two policies are close, which they are.
    return torch.expm1(log_ratio_N.clamp(max=MAX_LOG_RATIO)) - log_ratio_N
