"""Supervised training on the data's own answers: the warm start of a run, or (mode=sft) the whole of it.

The same trainer, packing and metrics as the policy loop, with another recipe.
"""

from collections.abc import Sequence

import numpy as np

from megatron_rl.config import Config
from megatron_rl.controller import Parts
from megatron_rl.types import Prompt, Rollouts, Sample


def warm_start(config: Config, parts: Parts) -> None:
    """`config.sft.steps` supervised updates, then a fresh optimizer for the policy; nothing when already resumable."""
    if config.sft.steps == 0:
        parts.trainer.begin("rl")
        return
    parts.trainer.begin("sft")
    for step in range(1, config.sft.steps + 1):
        with parts.metrics.warm_start_step(step, of=config.sft.steps) as m:
            m.log(_update(config, parts))
    parts.trainer.begin("rl")


def finetune(config: Config, parts: Parts) -> None:
    """Supervised updates until `config.steps`, resumable like the policy loop."""
    p = parts
    step = p.checkpoint.restore()
    while step < config.steps:
        step += 1
        with p.metrics.step(step) as m, m.time("update"):
            m.log(_update(config, p))
        if p.checkpoint.due(step):
            p.checkpoint.save(step)


def _update(config: Config, parts: Parts) -> dict[str, float]:
    prompts = parts.prompts.take(config.sft.prompts_per_step)
    return parts.trainer.update(parts.pack(demonstrations(prompts, parts.prompts.answer_tokens)))
