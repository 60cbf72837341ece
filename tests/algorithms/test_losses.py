import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.corrections import truncated_importance
from megatron_rl.algorithms.losses import LossInputs, clipped_token_loss, sft_loss
from megatron_rl.config import AlgorithmConfig, SftConfig

PARAMS = AlgorithmConfig(lr=1e-3, clip_low=0.2, clip_high=0.3)


def inputs_of(logprobs, old, advantages, *, reference=None, rollout=None, dtype=torch.float64):
    def tensor(values):
        return torch.tensor(values, dtype=dtype)

    return LossInputs(
        logprobs_N=tensor(logprobs).requires_grad_(),
        old_logprobs_N=tensor(old),
        rollout_logprobs_N=tensor(old if rollout is None else rollout),
        reference_logprobs_N=None if reference is None else tensor(reference),
        entropy_N=tensor([0.5] * len(logprobs)),
        advantages_N=tensor(advantages),
    )


def random_inputs(seed, *, n=257, spread=0.5, reference=True):
    torch.manual_seed(seed)
    old = -2 * torch.rand(n, dtype=torch.float64)
    return LossInputs(
        logprobs_N=(old + spread * torch.randn(n, dtype=torch.float64)).requires_grad_(),
        old_logprobs_N=old,
        rollout_logprobs_N=old + 0.01 * torch.randn(n, dtype=torch.float64),
        reference_logprobs_N=old + 0.3 * torch.randn(n, dtype=torch.float64) if reference else None,
        entropy_N=torch.rand(n, dtype=torch.float64),
        advantages_N=torch.randn(n, dtype=torch.float64),
    )


def slow_loss(inputs, params):
    """The same loss, a token at a time in Python floats, from the cases of PPO's figure 1."""
    total = {"loss": 0.0, "kl": 0.0, "entropy": 0.0, "ratio": 0.0, "clip_fraction": 0.0, "mismatch": 0.0}
    columns = [inputs.logprobs_N, inputs.old_logprobs_N, inputs.rollout_logprobs_N, inputs.entropy_N]
    for i, (new, old, rollout, entropy) in enumerate(zip(*[c.tolist() for c in columns], strict=True)):
        advantage = inputs.advantages_N[i].item()
        ratio = math.exp(new) / math.exp(old)
        if advantage > 0 and ratio > 1 + params.clip_high:
            used, cut = 1 + params.clip_high, 1
        elif advantage < 0 and ratio < 1 - params.clip_low:
            used, cut = 1 - params.clip_low, 1
        else:
            used, cut = ratio, 0
        other = rollout if inputs.reference_logprobs_N is None else inputs.reference_logprobs_N[i].item()
        kl = math.exp(other) / math.exp(new) - 1 - (other - new)
        total["loss"] += -used * advantage + params.kl_coef * kl
        total["kl"] += kl
        total["entropy"] += entropy
        total["ratio"] += ratio
        total["clip_fraction"] += cut
        total["mismatch"] += abs(old - rollout)
    return total


def test_importance_weights_multiply_each_tokens_term_and_are_capped():
    # The trainer's probability over the engine's: 1/2, 1, 2 and 8, of which the cap leaves 3; the KL is not weighed.
    rollout = [-1.0 + math.log(2), -1.0, -1.0 - math.log(2), -1.0 - math.log(8)]
    inputs = inputs_of([-1.0] * 4, [-1.0] * 4, [1.0, -2.0, 3.0, 5.0], rollout=rollout, reference=[-1.0] * 4)
    params = replace(PARAMS, importance_cap=3.0, kl_coef=0.5)
    loss, _ = clipped_token_loss(inputs, params)
    assert loss.item() == pytest.approx(-0.5 + 2 - 6 - 15, abs=1e-12)
    loss.backward()
    assert inputs.logprobs_N.grad.tolist() == pytest.approx([-0.5, 2.0, -6.0, -15.0], abs=1e-12)


def test_uncapped_importance_weights_give_the_mean_under_the_trainers_policy():
    trainer, engine = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.3, 0.3, 0.4])
    values = torch.tensor([1.0, -4.0, 2.0])
    weights = truncated_importance(trainer.log(), engine.log(), cap=math.inf)
    assert float((engine * weights * values).sum()) == pytest.approx(float((trainer * values).sum()), rel=1e-6)


def test_loss_worked_by_hand():
    # ratios 1, 2, 1/2, 2, 1/2; clip to [0.8, 1.3]
    half, two = math.log(0.5), math.log(2.0)
    inputs = inputs_of(
        [-1.0, -1.0 + two, -1.0 + half, -1.0 + two, -1.0 + half], [-1.0] * 5, [3.0, 1.0, 1.0, -1.0, -1.0]
    )
    loss, sums = clipped_token_loss(inputs, PARAMS)
    # token by token: -3; -1.3 (cut above); -0.5 (a fall is not cut when A > 0); +2 (nor a rise when A < 0); +0.8 (cut)
    assert loss.item() == pytest.approx(-3 - 1.3 - 0.5 + 2 + 0.8, abs=1e-12)
    assert sums["clip_fraction"].item() == 2
    assert sums["ratio"].item() == pytest.approx(1 + 2 + 0.5 + 2 + 0.5, abs=1e-12)
    assert sums["entropy"].item() == 2.5
    loss.backward()
    # d(-r A)/d logprob = -r A where not cut, 0 where cut
    assert inputs.logprobs_N.grad.tolist() == pytest.approx([-3.0, 0.0, -0.5, 2.0, 0.0], abs=1e-12)


def test_first_update_on_its_own_samples_is_the_plain_policy_gradient():
    inputs = inputs_of([-0.3, -2.0, -1.0], [-0.3, -2.0, -1.0], [1.5, -0.25, 0.0])
    loss, sums = clipped_token_loss(inputs, PARAMS)
    loss.backward()
    assert inputs.logprobs_N.grad.tolist() == [-1.5, 0.25, 0.0]
    assert sums["clip_fraction"].item() == 0


def test_kl_to_the_reference_worked_by_hand():
    # q/p = 2 and 1/4: k3 = 2 - 1 - log 2, 1/4 - 1 + log 4
    inputs = inputs_of([-2.0, -1.0], [-2.0, -1.0], [0.0, 0.0], reference=[-2 + math.log(2), -1 - math.log(4)])
    loss, sums = clipped_token_loss(inputs, replace(PARAMS, kl_coef=0.1))
    kl = (1 - math.log(2)) + (-0.75 + math.log(4))
    assert sums["kl"].item() == pytest.approx(kl, abs=1e-12)
    assert loss.item() == pytest.approx(0.1 * kl, abs=1e-12)
    loss.backward()
    # d k3 / d logprob = 1 - q/p
    assert inputs.logprobs_N.grad.tolist() == pytest.approx([0.1 * (1 - 2), 0.1 * (1 - 0.25)], abs=1e-12)


def test_without_a_reference_kl_is_to_the_policy_that_sampled_and_carries_no_gradient():
    inputs = inputs_of([-2.0], [-2.0], [0.0], rollout=[-2 + math.log(2)])
    loss, sums = clipped_token_loss(inputs, PARAMS)
    assert sums["kl"].item() == pytest.approx(1 - math.log(2), abs=1e-12)
    assert loss.item() == 0.0
    loss.backward()
    assert inputs.logprobs_N.grad.tolist() == [0.0]


def test_mismatch_is_the_distance_of_trainer_and_engine_at_the_weights_that_sampled():
    inputs = inputs_of([-9.0, -9.0], [-1.0, -2.0], [0.0, 0.0], rollout=[-1.25, -1.5])
    _, sums = clipped_token_loss(inputs, PARAMS)
    assert sums["mismatch/logprob_abs_diff_mean"].item() == 0.75


@pytest.mark.parametrize("reference", [False, True])
def test_loss_and_sums_equal_a_slow_independent_version(reference):
    for seed in range(5):
        inputs = random_inputs(seed, reference=reference)
        params = replace(PARAMS, kl_coef=0.07 if reference else 0.0)
        loss, sums = clipped_token_loss(inputs, params)
        slow = slow_loss(inputs, params)
        slow["mismatch/logprob_abs_diff_mean"] = slow.pop("mismatch")
        assert loss.item() == pytest.approx(slow["loss"], rel=1e-10)  # float64, other order of summation
        assert {k: v.item() for k, v in sums.items()} == pytest.approx(slow, rel=1e-10)
        assert slow["clip_fraction"] > 10  # the cases that matter were met


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradient_equals_finite_differences(kl_coef):
    inputs = random_inputs(7, n=61)
    params = replace(PARAMS, kl_coef=kl_coef)

    def loss_of(logprobs_N):
        return clipped_token_loss(replace(inputs, logprobs_N=logprobs_N), params)[0]

    assert torch.autograd.gradcheck(loss_of, (inputs.logprobs_N,), eps=1e-7, atol=1e-6)


def test_sums_carry_no_gradient():
    inputs = random_inputs(3, n=11)
    others = {
        name: getattr(inputs, name).clone().requires_grad_()
        for name in ("old_logprobs_N", "rollout_logprobs_N", "reference_logprobs_N", "entropy_N", "advantages_N")
    }
    _, sums = clipped_token_loss(replace(inputs, **others), PARAMS)
    assert not any(value.requires_grad for value in sums.values())


def test_sums_of_two_parts_add_up_to_the_whole():
    whole = random_inputs(11, n=20)
    fields = {name: getattr(whole, name) for name in LossInputs.__slots__}
    first, second = (LossInputs(**{k: v[part] for k, v in fields.items()}) for part in (slice(0, 7), slice(7, 20)))
    params = replace(PARAMS, kl_coef=0.1)
    parts = [clipped_token_loss(part, params)[1] for part in (first, second)]
    for key, value in clipped_token_loss(whole, params)[1].items():
        assert (parts[0][key] + parts[1][key]).item() == pytest.approx(value.item(), rel=1e-12)


def test_a_policy_far_from_the_one_that_sampled_gives_finite_loss_and_gradient():
    for advantage in (1.0, -1.0):
        for distance in (200.0, -200.0):
            inputs = inputs_of([-1.0 + distance], [-1.0], [advantage], reference=[-1.0 - distance], dtype=torch.float32)
            loss, _ = clipped_token_loss(inputs, replace(PARAMS, kl_coef=0.1))
            loss.backward()
            assert torch.isfinite(loss) and torch.isfinite(inputs.logprobs_N.grad).all(), (advantage, distance)


def test_a_micro_batch_without_response_tokens_adds_nothing_and_still_has_a_gradient():
    for params in (PARAMS, replace(PARAMS, kl_coef=0.1)):
        loss, sums = clipped_token_loss(inputs_of([], [], []), params)
        loss.backward()
        assert loss.item() == 0.0
        assert all(value.item() == 0.0 for value in sums.values())


def test_a_kl_penalty_without_a_reference_is_our_own_fault():
    with pytest.raises(AssertionError, match="0.1"):
        clipped_token_loss(inputs_of([-1.0], [-1.0], [1.0]), replace(PARAMS, kl_coef=0.1))


def test_sft_loss_is_the_negative_log_likelihood():
    inputs = inputs_of([-0.25, -1.5], [0.0, 0.0], [9.0, 9.0])
    loss, sums = sft_loss(inputs, SftConfig(lr=1e-3))
    loss.backward()
    assert loss.item() == 1.75
    assert inputs.logprobs_N.grad.tolist() == [-1.0, -1.0]
    assert {k: v.item() for k, v in sums.items()} == {"loss": 1.75, "entropy": 1.0}
