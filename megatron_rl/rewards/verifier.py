"""The verifier of the reasoning_gym task that generated the prompt."""

import json
import logging

from megatron_rl.errors import ConfigError
from megatron_rl.rewards.types import RewardFunction
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)

# What the library's parsers raise on text that no author of theirs thought of. The text is a model's; it earns nothing.
_PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, RecursionError)


def verifier() -> RewardFunction:
    """A reward that asks `score_answer` of the prompt's own task; it builds each task once. Scores lie in [0, 1]."""
    import reasoning_gym

    tasks: dict[str, reasoning_gym.dataset.ProceduralDataset] = {}

    def reward(response: str, prompt: Prompt) -> float:
        if "entry" not in prompt.metadata:
            raise ConfigError(
                f"reward.name=verifier cannot judge prompt {prompt.id}: reasoning_gym did not generate it, so nothing "
                "knows how to verify it. Set reward.name to exact or math, or data.source to reasoning_gym."
            )
        task, options = prompt.metadata["task"], prompt.metadata["task_options"]
        key = json.dumps([task, options], sort_keys=True)
        if key not in tasks:
            tasks[key] = reasoning_gym.create_dataset(task, size=1, seed=0, **options)
        try:
            return float(tasks[key].score_answer(response, prompt.metadata["entry"]))
        except _PARSE_ERRORS as error:
            logger.warning("%s cannot parse %r (%s: %s): scored 0", task, response, type(error).__name__, error)
            return 0.0

    return reward
