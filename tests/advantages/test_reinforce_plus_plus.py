"""REINFORCE++ against numbers worked by hand, and what it is a special case of."""

import math

import pytest
import torch

from rlhf_lightning.advantages import gae, reinforce_plus_plus
from rlhf_lightning.functional.kl import kl_shaped_rewards

MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_by_hand():
    """beta 0.5 and KL 0.2, 0.4, 0 and 0.6, 0.2; scores 2 and -1, each at the last valid token.

    Rewards -0.1, -0.2, 2 and -0.3, -1.1: returns to go 1.7, 1.8, 2 and -1.4, -1.1. Their mean is 3 / 5, their
    squares sum to 2.89 + 3.24 + 4 + 1.96 + 1.21 = 13.3, so the variance is 2.66 - 0.36 = 2.3.
    """
    kl = torch.tensor([[0.2, 0.4, 0.0], [0.6, 0.2, 99.0]])
    rewards = kl_shaped_rewards(torch.tensor([2.0, -1.0]), kl=kl, mask=MASK, beta=0.5)
    advantages, returns = reinforce_plus_plus(rewards, mask=MASK, gamma=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.7, 1.8, 2.0], [-1.4, -1.1, 0.0]]))
    std = math.sqrt(2.3)
    expected = torch.tensor([[1.1 / std, 1.2 / std, 1.4 / std], [-2.0 / std, -1.7 / std, 0.0]])
    torch.testing.assert_close(advantages, expected)


def test_gamma_discounts_what_comes_later():
    rewards = torch.tensor([[0.0, 1.0, 4.0], [2.0, 8.0, 99.0]])
    _, returns = reinforce_plus_plus(rewards, mask=MASK, gamma=0.5)
    assert returns.tolist() == [[1.5, 3.0, 4.0], [6.0, 8.0, 0.0]]


def test_is_gae_on_values_of_zero_whitened():
    rewards = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    advantages, returns = reinforce_plus_plus(rewards, mask=MASK, gamma=0.9)
    plain, _ = gae(rewards, values=torch.zeros(2, 3), mask=MASK, gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns, plain)
    valid = advantages[MASK].double()
    assert valid.mean().item() == pytest.approx(0, abs=1e-6) and valid.std(
        correction=0
    ).item() == pytest.approx(1)


def test_equal_returns_are_not_blown_up():
    rewards = torch.tensor([[0.0, 0.0, 1.3], [0.0, 1.3, 7.0]])
    assert not reinforce_plus_plus(rewards, mask=MASK, gamma=1.0)[0].any()
