"""Supervised training on the data's own answers: the warm start of a run, or (mode=sft) the whole of it.

The same trainer, packing and metrics as the policy loop, with another loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.checkpoint import Checkpoints
from megatron_rl.config import Config
from megatron_rl.data.packing import Packer
from megatron_rl.data.prompts import Prompts
from megatron_rl.metrics import Metrics
from megatron_rl.protocols import Trainer
from megatron_rl.types import Prompt, Rollouts, Sample


@dataclass(frozen=True, slots=True)
class Training:
    """What training needs, with or without engines."""

    prompts: Prompts
    trainer: Trainer
    pack: Packer
    checkpoint: Checkpoints
    metrics: Metrics


def warm_start(config: Config, parts: Training) -> int:
    """`config.sft.steps` supervised updates of a fresh run, then a fresh optimizer for the policy. Returns: step 0."""
    p = parts
    if config.sft.steps > 0:
        p.trainer.begin("sft")
        for step in range(1, config.sft.steps + 1):
            p.checkpoint.stop_if_asked(f"{step - 1} of the warm start's {config.sft.steps} steps are lost")
            with p.metrics.warm_start_step(step, of=config.sft.steps) as m, m.time("update"):
                m.log(_update(config, p))
    p.trainer.begin("rl")
    if config.sft.steps > 0 and p.checkpoint.due(0):
        p.checkpoint.save(0)
    return 0


def finetune(config: Config, parts: Training) -> None:
    """Supervised updates until `config.steps`, resumable like the policy loop."""
    p = parts
    step = p.checkpoint.restore()
    if step is None:
        step = 0
        p.trainer.begin("sft")
    while step < config.steps:
        step += 1
        with p.metrics.step(step) as m, m.time("update"):
            m.log(_update(config, p))
        if p.checkpoint.due(step):
            p.checkpoint.save(step)


def _update(config: Config, parts: Training) -> dict[str, float]:
    prompts = parts.prompts.take(config.sft.prompts_per_step)
    return parts.trainer.update(parts.pack(demonstrations(prompts, parts.prompts), mini_batches=1))


def demonstrations(prompts: Sequence[Prompt], source: Prompts) -> list[Sample]:
    """One sample per prompt whose response is the reference answer, ended."""
    answers = [source.answer_tokens(p) for p in prompts]
    rows = [np.array((*p.tokens, *answer), np.int32) for p, answer in zip(prompts, answers, strict=True)]
    tokens = np.concatenate(rows)
    rollouts = Rollouts(
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        prompt_lengths=np.array([len(p.tokens) for p in prompts], np.int64),
    )
    return [
        Sample(
            prompt_id=prompt.id,
            group=i,
            rollouts=rollouts,
            row=i,
            prompt_tokens=len(prompt.tokens),
            response_tokens=len(answers[i]),
            finish="stop",
            version=0,
        )
        for i, prompt in enumerate(prompts)
    ]
