import math

import pytest
import torch

from megatron_rl.algorithms.kl import k3


def test_the_estimator_worked_by_hand():
    p, q = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.0 + math.log(2)], dtype=torch.float64)
    assert k3(p, q).item() == pytest.approx(2 - 1 - math.log(2))


def test_k3_averages_to_the_exact_divergence_over_all_outcomes():
    torch.manual_seed(0)
    p, q = (torch.randn(9, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p.exp() * k3(p, q)).sum().item() == pytest.approx(exact, rel=1e-12)


def test_gradient_of_k3_is_one_minus_the_ratio():
    torch.manual_seed(1)
    p, q = (torch.randn(5, dtype=torch.float64).log_softmax(0) for _ in range(2))
    p = p.requires_grad_()
    (gradient,) = torch.autograd.grad(k3(p, q).sum(), p)
    assert gradient.tolist() == pytest.approx((1 - (q - p.detach()).exp()).tolist(), rel=1e-12)


def test_k3_is_zero_only_where_the_policies_agree():
    p = torch.tensor([-1.0, -1.0, -1.0])
    q = torch.tensor([-1.0, -1.5, -0.5])
    estimate = k3(p, q)
    assert estimate[0].item() == 0.0
    assert (estimate[1:] > 0).all()


def test_k3_keeps_its_digits_when_the_policies_are_close_in_float32():
    p, q = torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12])
    d = 2.0**-12
    assert k3(p, q).item() == pytest.approx(d * d / 2 + d**3 / 6, rel=2e-3)  # float32: expm1(d) - d cancels 12 bits


def test_k3_is_finite_and_still_grows_where_the_ratio_would_overflow():
    p = torch.tensor([-100.0, -500.0])
    values = k3(p, torch.zeros(2))
    assert torch.isfinite(values).all()
    assert values[1] < values[0]  # -log(q/p) is linear beyond the held exponent
