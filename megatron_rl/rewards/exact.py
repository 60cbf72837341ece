"""Exact match."""

from megatron_rl.rewards.types import reference_answer
from megatron_rl.types import Prompt


def exact(response: str, prompt: Prompt) -> float:
    """1.0 when the response is the reference answer, white space around either aside; else 0.0."""
    return float(response.strip() == reference_answer(prompt).strip())
