"""The algorithms: each a row that combines an advantage estimator, a loss, and which samples are worth training on."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import grpo
from megatron_rl.algorithms.losses import Loss, clipped_token_loss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.types import Batch, Sample


def keep_all(samples: list[Sample]) -> list[Sample]:
    """Train on every sample."""
    return samples


def needs_reference(params: AlgorithmConfig) -> bool:
    """Whether the loss looks at a frozen copy of the starting weights."""
    return params.kl_coef > 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """One algorithm."""

    advantages: Callable[[Tensor], Tensor]
    """rewards [P, G] -> advantages [P, G]."""
    loss: Loss
    """Over the response tokens of a micro-batch."""
    keep: Callable[[list[Sample]], list[Sample]] = keep_all
    """Whole groups that train; the others are dropped before packing."""
    needs_reference: Callable[[AlgorithmConfig], bool] = needs_reference

    def apply(self, batch: Batch) -> Batch:
        """Fill `batch.advantages` from the rewards of each group.

        Raises: DataError for a sample without a finite reward, and for a group of one.
        """
        return replace(batch, advantages=group_advantages(batch.samples, self.advantages))


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(advantages=grpo, loss=clipped_token_loss),
}


def find_recipe(name: str) -> Recipe:
    """The recipe `name`. Raises: ConfigError for an unknown one."""
    if name not in RECIPES:
        raise ConfigError(f"algorithm.recipe={name!r} is not one of {', '.join(RECIPES)}.")
    return RECIPES[name]


def group_advantages(samples: Sequence[Sample], advantages: Callable[[Tensor], Tensor]) -> np.ndarray:
    """float32 [S]: each sample's advantage within its group, in the order of `samples`; groups may differ in size."""
    members: dict[int, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        if sample.reward is None or not math.isfinite(sample.reward):
            raise DataError(
                f"Sample {i} (prompt {sample.prompt_id}, group {sample.group}) has reward {sample.reward}: an "
                "advantage needs a finite number. Mend the reward function; rewards are written to samples.jsonl."
            )
        members[sample.group].append(i)
    by_size: dict[int, list[list[int]]] = defaultdict(list)
    for indices in members.values():
        if len(indices) < 2:
            only = samples[indices[0]]
            raise DataError(
                f"Group {only.group} (prompt {only.prompt_id}) holds one sample: there is nothing to compare it with. "
                "Set sampling.samples_per_prompt to 2 or more; with recorded samples, keep whole groups."
            )
        by_size[len(indices)].append(indices)
    rewards_S = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    result_S = torch.empty_like(rewards_S)
    for groups in by_size.values():
        index_PG = torch.tensor(groups)
        result_S[index_PG] = advantages(rewards_S[index_PG])
    return result_S.numpy()
