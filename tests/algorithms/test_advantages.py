import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import grpo
from megatron_rl.algorithms.losses import clipped_token_loss
from megatron_rl.algorithms.recipes import RECIPES
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import DataError
from megatron_rl.types import Batch, Sample


def test_grpo_worked_by_hand():
    # (1, 0, 0, 0): mean 1/4, std sqrt(3)/4; (3, 5, 3, 5): mean 4, std 1
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 5.0, 3.0, 5.0]])
    result = grpo(rewards, eps=0.0)
    s = math.sqrt(3)
    assert result[0].tolist() == pytest.approx([s, -1 / s, -1 / s, -1 / s], rel=1e-6)
    assert result[1].tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert grpo(rewards, divide_by_std=False)[0].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_eps_is_added_to_the_standard_deviation():
    assert grpo(torch.tensor([[0.0, 2.0]]), eps=1.0).tolist() == [[-0.5, 0.5]]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=12))
def test_grpo_equals_numpy_in_float64(rewards):
    r = np.array(rewards, dtype=np.float64)
    expected = np.zeros_like(r) if (r == r[0]).all() else (r - r.mean()) / (r.std() + 1e-6)
    result = grpo(torch.tensor([rewards], dtype=torch.float64))[0].numpy()
    assert result == pytest.approx(expected, rel=1e-6, abs=1e-6)  # cancellation in r - mean, at a spread of 1e-6


@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 17))
def test_grpo_gives_exact_zero_when_all_rewards_are_equal(reward, size):
    assert (grpo(torch.full((1, size), reward)) == 0).all()


@pytest.mark.parametrize("size", [0, 1])
def test_grpo_refuses_a_group_without_a_comparison(size):
    with pytest.raises(DataError, match=f"holds {size} sample.*samples_per_prompt to 2 or more"):
        grpo(torch.zeros(3, size))


def samples_of(rewards_by_group):
    return tuple(
        Sample(f"p{g}", g, None, 0, prompt_tokens=3, response_tokens=2, finish="stop", version=0, reward=r)
        for g, r in rewards_by_group
    )


def test_recipe_compares_a_sample_with_its_group_only_wherever_it_stands():
    # interleaved groups of unequal size: 7 -> (1, 3), 2 -> (0, 0, 6)
    batch = Batch(samples_of([(7, 1.0), (2, 0.0), (2, 0.0), (7, 3.0), (2, 6.0)]), schedule=())
    filled = RECIPES["grpo"].apply(batch)
    s = math.sqrt(2)
    assert filled.advantages.dtype == np.float32
    assert filled.advantages.tolist() == pytest.approx([-1.0, -1 / s, -1 / s, 1.0, s], rel=1e-5)
    assert filled.samples is batch.samples
    assert batch.advantages is None


def test_recipe_refuses_a_sample_without_a_finite_reward():
    for reward in (None, math.nan, math.inf):
        with pytest.raises(DataError, match=rf"Sample 1 \(prompt p4, group 4\) has reward {reward}"):
            RECIPES["grpo"].apply(Batch(samples_of([(4, 1.0), (4, reward)]), schedule=()))


def test_recipe_names_the_group_that_holds_a_single_sample():
    with pytest.raises(DataError, match=r"Group 9 \(prompt p9\) holds one sample"):
        RECIPES["grpo"].apply(Batch(samples_of([(4, 1.0), (4, 0.0), (9, 1.0)]), schedule=()))


def test_grpo_recipe_needs_a_reference_only_for_a_kl_penalty_and_keeps_every_sample():
    recipe = RECIPES["grpo"]
    samples = list(samples_of([(0, 1.0), (0, 1.0)]))
    assert recipe.loss is clipped_token_loss
    assert recipe.keep(samples) == samples
    assert not recipe.needs_reference(AlgorithmConfig(lr=1.0))
    assert recipe.needs_reference(AlgorithmConfig(lr=1.0, kl_coef=0.01))
