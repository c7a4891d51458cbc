"""Learning rates in optimizer steps, worked by hand."""

from __future__ import annotations

import pytest

from rlhf_lightning.config.algorithms import PPOConfig
from rlhf_lightning.stages.schedule import rate_factor


def test_the_horizon_is_counted_in_optimizer_steps():
    """10 rollouts of 64 rows, minibatches of 16, 4 epochs: 16 steps each, 160 in all, whatever the cut."""
    ppo = PPOConfig(iterations=10, prompts_per_iteration=64, minibatch_size=16, epochs=4, micro_batch_size=8)
    assert (ppo.steps_per_iteration, ppo.total_steps) == (16, 160)
    shares = [rate_factor(s, total=ppo.total_steps, warmup=0, schedule="linear") for s in (0, 16, 80, 160)]
    assert shares == pytest.approx([1.0, 0.9, 0.5, 0.0])


def test_cosine_is_half_way_down_in_the_middle():
    shares = [rate_factor(s, total=8, warmup=0, schedule="cosine") for s in (0, 4, 8)]
    assert shares == pytest.approx([1.0, 0.5, 0.0])


def test_warm_up_is_linear_and_then_the_schedule_begins():
    rates = [rate_factor(s, total=13, warmup=3, schedule="linear") for s in range(14)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[8] == pytest.approx(0.5) and rates[13] == 0.0
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_constant_stays():
    assert {rate_factor(s, total=5, warmup=0, schedule="constant") for s in range(9)} == {1.0}
