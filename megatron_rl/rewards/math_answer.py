"""Mathematical equality with the reference answer, by the math-verify library."""

import logging

from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.types import RewardFunction, reference_answer
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)


def math_answer() -> RewardFunction:
    """A reward of 1.0 for a response whose final mathematical expression equals the reference answer, else 0.0.

    A comparison that takes longer than `judge.TIMEOUT_S`, or kills its judge, scores 0.0.
    """
    judge = Judge("math_judge.py")

    def reward(response: str, prompt: Prompt) -> float:
        score = judge.ask(reference_answer(prompt), response)
        if score is None:
            logger.warning(
                "no verdict within %.0f s on prompt %s, response %r: scored 0",
                judge.timeout_s,
                prompt.id,
                response[-80:],
            )
            return 0.0
        return score

    return reward
