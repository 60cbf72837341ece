"""Advantage estimators: pure functions of the rewards of one step."""

# P prompts, G samples per prompt

import torch
from torch import Tensor

from megatron_rl.errors import DataError


def grpo(rewards_PG: Tensor, *, divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Center each prompt's rewards on their group mean.

    A = (r - mean_G(r)) / (std_G(r) + eps), std over G with no Bessel correction.
    Args: rewards_PG float32 [P, G], any scale.
    Returns: [P, G], same order; all zeros for a group whose rewards are equal.
    Raises: DataError when G < 2, where a group mean carries no signal.
    Source: DeepSeekMath, arXiv:2402.03300, eq. for outcome supervision.
    """
    group_size = rewards_PG.shape[1]
    if group_size < 2:
        raise DataError(
            f"A group holds {group_size} sample(s): its mean is the reward itself, so every advantage is 0 and nothing "
            "is learned. Set sampling.samples_per_prompt to 2 or more (8 is usual)."
        )
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if divide_by_std:
        centered_PG = centered_PG / (rewards_PG.std(dim=1, keepdim=True, correction=0) + eps)
    # The mean of equal float32 rewards can be off by a rounding, which the division would blow up to 1e-2.
    is_uniform_P1 = (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True)
    return torch.where(is_uniform_P1, torch.zeros_like(centered_PG), centered_PG)
