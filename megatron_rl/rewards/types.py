"""What a reward is."""

from collections.abc import Callable

from megatron_rl.errors import DataError
from megatron_rl.types import Prompt

RewardFunction = Callable[[str, Prompt], float]
"""(text of the response without special tokens, prompt) -> score."""


def reference_answer(prompt: Prompt) -> str:
    """The answer to compare with. Raises: DataError when the source gives none, as some reasoning_gym tasks do."""
    if not prompt.answer:
        raise DataError(
            f"Prompt {prompt.id} has no reference answer to compare with: its task has many right ones. "
            "Set reward.name=verifier, which checks an answer by itself."
        )
    return prompt.answer
