"""The choice behind ``advantage=``: each kind on the same four answers, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter

from rlhf_lightning.advantages import RunningBaseline
from rlhf_lightning.config.algorithms import AdvantageConfig, PPOConfig
from rlhf_lightning.functional.kl import kl_shaped_rewards
from rlhf_lightning.rollout.advantage import estimate

MASK = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
KL = torch.tensor([[1.0, 1.0], [2.0, 50.0], [0.0, 4.0], [-1.0, 1.0]])
SCORES = torch.tensor([2.0, 4.0, 3.0, -1.0])
SHAPED = [1.0, 3.0, 1.0, -1.0]  # scores less half the KL of the response: 2, 2, 4 and 0
# Two answers a or 2a apart from their mean: the sample's deviation is a sqrt(2), and 1e-4 is added to it.
NEAR, FAR = 1 / (math.sqrt(2) + 1e-4), 2 / (2 * math.sqrt(2) + 1e-4)


def of(kind: str, *, beta: float = 0.5, baseline: RunningBaseline | None = None, ppo=None, **options):
    """Advantages and returns of the four answers, two to a prompt."""
    return estimate(
        kl_shaped_rewards(SCORES, kl=KL, mask=MASK, beta=beta),
        mask=MASK,
        values=torch.zeros(4, 2),
        last_values=None,
        advantage=TypeAdapter(AdvantageConfig).validate_python({"kind": kind} | options),
        ppo=PPOConfig(samples_per_prompt=2, **(ppo or {})),
        baseline=baseline or RunningBaseline(),
    )


def spread(gains: list[float]) -> torch.Tensor:
    return torch.where(MASK, torch.tensor(gains).unsqueeze(1), 0.0)


@pytest.mark.parametrize(
    ("kind", "options", "gains"),
    [
        ("rloo", {}, [-2, 2, 2, -2]),
        ("grpo", {"scale": False}, [-1, 1, 1, -1]),
        ("grpo", {"scale": True}, [-NEAR, NEAR, NEAR, -NEAR]),
        ("reinforce", {}, [0, 2, 0, -2]),  # the first iteration has its own mean, 1, to compare with
    ],
)
def test_a_response_is_judged_by_its_score_less_its_kl(kind, options, gains):
    advantages, returns = of(kind, **options)
    torch.testing.assert_close(advantages, spread([float(gain) for gain in gains]))
    torch.testing.assert_close(returns, spread(SHAPED))


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("kind", ["rloo", "reinforce", "grpo"])
def test_without_kl_the_score_alone_counts_and_is_not_whitened(kind, whiten):
    scaled = [-NEAR, NEAR, FAR, -FAR]
    gains = {"rloo": [-2, 2, 4, -4], "reinforce": [0, 2, 1, -3], "grpo": scaled}[kind]
    advantages, _ = of(kind, beta=0.0, ppo={"whiten_advantages": whiten})
    torch.testing.assert_close(advantages, spread([float(gain) for gain in gains]))


def test_grpo_divides_by_the_groups_deviation():
    torch.testing.assert_close(of("grpo", beta=0.0, scale=False)[0], spread([-1.0, 1.0, 2.0, -2.0]))
    torch.testing.assert_close(of("grpo", beta=0.0, scale=True)[0], spread([-NEAR, NEAR, FAR, -FAR]))


def test_reinforce_compares_with_earlier_iterations():
    baseline = RunningBaseline()
    of("reinforce", baseline=baseline, decay=0.5)
    assert baseline.value == 1.0
    # Without the KL the mean is 2; the answers are judged by the old baseline, 1, and only then it moves.
    advantages, _ = of("reinforce", beta=0.0, baseline=baseline, decay=0.5)
    torch.testing.assert_close(advantages, spread([1.0, 3.0, 2.0, -2.0]))
    assert baseline.value == 1.5


@pytest.mark.parametrize("kind", ["gae", "reinforce_plus_plus", "rloo", "grpo"])
def test_the_baseline_is_the_business_of_reinforce_alone(kind):
    baseline = RunningBaseline()
    of(kind, baseline=baseline)
    assert baseline.value is None


def test_reinforce_plus_plus_is_whitened_whatever_the_switch_says():
    """Rewards -0.5, 1.5; 3; 0, 1; 0.5, -1.5: to go 1, 1.5; 3; 1, 1; -1, -1.5.

    Mean 5 / 7, squares 17.5 / 7.
    """
    std = math.sqrt(17.5 / 7 - 25 / 49)
    to_go = torch.tensor([[1.0, 1.5], [3.0, 0.0], [1.0, 1.0], [-1.0, -1.5]])
    for whiten in (True, False):
        advantages, returns = of("reinforce_plus_plus", ppo={"whiten_advantages": whiten})
        torch.testing.assert_close(returns, to_go)
        torch.testing.assert_close(advantages, torch.where(MASK, (to_go - 5 / 7) / std, 0.0))


def test_gae_obeys_the_switch():
    plain, returns = of("gae", ppo={"whiten_advantages": False, "lam": 1.0})
    torch.testing.assert_close(plain, returns)  # the values are 0
    white, same = of("gae", ppo={"lam": 1.0})
    torch.testing.assert_close(white, of("reinforce_plus_plus")[0])
    torch.testing.assert_close(same, returns)
