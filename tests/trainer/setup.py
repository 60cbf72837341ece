"""What the trainer's tests share: a config, a checkpoint, a batch, and what one rank answers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    SamplingConfig,
    SftConfig,
    TrainerConfig,
)
from megatron_rl.models.random_checkpoint import write_random_checkpoint
from megatron_rl.trainer.worker import Worker
from megatron_rl.types import Batch, Rollouts, Sample
from tests.tiny import CHARACTERS, TINY


def make_config(
    parallel: dict[str, Any] | None = None,
    *,
    world_size: int = 1,
    dtype: str = "float32",
    distributed_optimizer: bool = True,
    algorithm: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    seed: int = 0,
) -> Config:
    """A config whose trainer is as given; nothing here reads the rest."""
    return Config(
        name="test",
        steps=8,
        prompts_per_step=2,
        model=ModelConfig(path="unused"),
        data=DataConfig(source="jsonl", path="unused"),
        reward=RewardConfig(name="exact"),
        sampling=SamplingConfig(max_tokens=8),
        algorithm=AlgorithmConfig(**{"lr": 1e-3, **(algorithm or {})}),
        sft=SftConfig(lr=1e-3, steps=8),
        parallel=ParallelConfig(**(parallel or {})),
        trainer=TrainerConfig(
            world_size=world_size,
            dtype=dtype,
            distributed_optimizer=distributed_optimizer,
            megatron=megatron or {},
        ),
        seed=seed,
    )


def write_checkpoint(directory: Path, family: str, *, dtype: str = "float32") -> str:
    """A tiny checkpoint whose norms and router biases differ from 1 and 0."""
    write_random_checkpoint(directory, {**TINY[family], "dtype": dtype}, characters=CHARACTERS, seed=0, jitter=0.1)
    return str(directory)


def make_rollouts(lengths: list[int], prompt_lengths: list[int], *, seed: int = 0) -> Rollouts:
    """Random tokens; the engine's log-probabilities are near those of a uniform guess."""
    rng = np.random.default_rng(seed)
    logprobs = np.concatenate(
        [
            np.where(np.arange(n) < p, 0.0, rng.normal(-4.1, 0.3, n))
            for n, p in zip(lengths, prompt_lengths, strict=True)
        ]
    )
    return Rollouts(
        tokens=rng.integers(3, len(CHARACTERS), sum(lengths)).astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.array(prompt_lengths),
    )


def make_batch(rollouts: Rollouts, schedule: Any, *, seed: int = 0) -> Batch:
    """All rows of `rollouts`, with random advantages."""
    count = len(rollouts.prompt_lengths)
    samples = tuple(Sample(f"p{i // 2}", i // 2, rollouts, i, 0, 0, "stop", 0, 0.0) for i in range(count))
    advantages = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return Batch(samples=samples, schedule=schedule, advantages=advantages)


def start(rank: int, config: Config, directory: str, meeting: str, phase: str = "rl") -> Worker:
    """A worker that is ready to train."""
    worker = Worker(config, rank, directory)
    worker.build(meeting)
    worker.begin(phase)
    return worker


def gradients_of(worker: Worker) -> dict[str, torch.Tensor]:
    """This rank's gradients under their layout names; multi-token prediction layers have none."""
    return {
        f"{i}:{name}": p.main_grad.detach().clone()
        for i, chunk in enumerate(worker.chunks)
        for name, p in chunk.module.named_parameters()
        if p.requires_grad
    }
