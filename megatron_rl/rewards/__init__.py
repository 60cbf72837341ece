"""Rewards: each judges the text of one response. A row of REWARDS makes the function; whoever judges keeps it."""

import difflib
import math
import traceback
from collections.abc import Callable
from numbers import Real

from megatron_rl.errors import BackendError, ConfigError, DataError
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

    Raises: ConfigError for an unknown name. The reward: DataError for a score that is no finite number, and with the
    place for what the function itself raised by mistake.
    """
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"reward.name={name!r} is not one of {', '.join(REWARDS)}.{hint}")
    judge = REWARDS[name]()

    def reward(response: str, prompt: Prompt) -> float:
        what = f"response {response[-80:]!r} of prompt {prompt.id}"
        mend = "Mend the reward function, or drop the prompt."
        try:
            score = judge(response, prompt)
        except (ConfigError, DataError, BackendError):
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"reward.name={name} could not judge {what}: {type(error).__name__}: {error} "
                f"({place.filename} line {place.lineno}). {mend}"
            ) from error
        # Of anything else no mean can be taken, and it reaches no threshold.
        if not isinstance(score, Real) or not math.isfinite(score):
            raise DataError(f"reward.name={name} gave {score} to {what}: a reward is a finite number. {mend}")
        return float(score if threshold is None else score >= threshold)

    return reward
