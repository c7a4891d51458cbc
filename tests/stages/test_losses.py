"""What an update adds up to where its last step was called off."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.functional.policy_losses import clipped_surrogate_loss, clipped_value_loss
from rlhf_lightning.stages.losses import UpdateStats


def add(stats: UpdateStats, ratio: float, value: float) -> None:
    one, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    logprobs = torch.full((1, 2), ratio).log()
    stats.add_policy(
        *clipped_surrogate_loss(logprobs, old_logprobs=0 * one, advantages=one, mask=mask, clip=0.2)
    )
    stats.add_critic(*clipped_value_loss(value * one, old_values=0 * one, returns=0 * one, mask=mask))


def test_a_step_that_was_called_off_counts_in_no_mean_over_steps():
    """Two steps with losses -1 and -1.2 (clipped), values 1 and 3; the third is the one past target_kl."""
    stats = UpdateStats(steps=4, epochs=2)
    for ratio, value in ((1.0, 1.0), (1.5, 3.0)):
        add(stats, ratio, value)
        stats.end_step({"policy": 1.0, "critic": 2.0})
    add(stats, 3.0, 100.0)
    metrics = stats.metrics()
    assert metrics["policy/loss"] == pytest.approx(-1.1)
    assert metrics["critic/loss"] == pytest.approx((0.5 + 4.5) / 2)
    assert (metrics["policy/grad_norm"], metrics["critic/grad_norm"]) == (1.0, 2.0)
    assert metrics["ppo/epochs_done"] == 1.0
    # Seen is seen: the ratios tell why the epochs ended.
    assert metrics["policy/ratio_max"] == pytest.approx(3.0)
    assert metrics["policy/ratio_mean"] == pytest.approx((1.0 + 1.5 + 3.0) / 3)
