"""What makes up for samples whose probabilities in the engine are not those in the trainer."""

# N response tokens of a packed micro-batch

from torch import Tensor


def truncated_importance(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, *, cap: float) -> Tensor:
    """Weight of each token: its probability in the trainer over that in the engine that sampled it, at most `cap`.

    Without the cap the mean of weighted terms is that under the trainer's policy; the cap trades a bias, where the two
    are far apart, for a bounded variance. Carries no gradient.
    Source: Ionides, "Truncated Importance Sampling" (2008); between two engines: Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return (old_logprobs_N - rollout_logprobs_N).detach().exp().clamp(max=cap)
