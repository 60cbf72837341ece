"""Rewards: each judges the text of one response. A row of REWARDS makes the function; whoever judges keeps it."""

import difflib
from collections.abc import Callable

from megatron_rl.errors import ConfigError
from megatron_rl.rewards.exact import exact
from megatron_rl.rewards.math_answer import math_answer
from megatron_rl.rewards.types import RewardFunction
from megatron_rl.rewards.verifier import verifier
from megatron_rl.types import Prompt

REWARDS: dict[str, Callable[[], RewardFunction]] = {
    "exact": lambda: exact,
    "math": math_answer,
    "verifier": verifier,
}


def load_reward(name: str, *, threshold: float | None = None) -> RewardFunction:
    """The reward `name`. With a threshold, a score becomes 1.0 if it reaches it and 0.0 if not.

    Raises: ConfigError for an unknown name.
    """
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"reward.name={name!r} is not one of {', '.join(REWARDS)}.{hint}")
    score = REWARDS[name]()
    if threshold is None:
        return score

    def reached(response: str, prompt: Prompt) -> float:
        return float(score(response, prompt) >= threshold)

    return reached
