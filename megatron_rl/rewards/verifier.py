"""The verifier of the reasoning_gym task that generated the prompt."""

import logging

from megatron_rl.errors import ConfigError
from megatron_rl.rewards.judge import TIMEOUT_S, Judge
from megatron_rl.rewards.types import RewardFunction
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)


def verifier(*, timeout_s: float = TIMEOUT_S) -> RewardFunction:
    """A reward that asks `score_answer` of the prompt's own task. Scores lie in [0, 1].

    A response that takes longer than `timeout_s` scores 0.0: some tasks compute what it says, which may be 9**9**9**9.
    """
    judge = Judge("verifier_judge.py", timeout_s=timeout_s)

    def reward(response: str, prompt: Prompt) -> float:
        if "entry" not in prompt.metadata:
            raise ConfigError(
                f"reward.name=verifier cannot judge prompt {prompt.id}: reasoning_gym did not generate it, so nothing "
                "knows how to verify it. Set reward.name to exact or math, or data.source to reasoning_gym."
            )
        data = prompt.metadata
        score = judge.ask(data["task"], data["task_options"], response, data["entry"])
        if score is None:
            logger.warning("no verdict on prompt %s, response %r: scored 0", prompt.id, response[-80:])
            return 0.0
        return score

    return reward
