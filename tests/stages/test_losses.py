"""What an update adds up to, and the terms of its loss by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.advantages import per_token, reinforce
from rlhf_lightning.config.algorithms import PPOConfig
from rlhf_lightning.functional.policy_losses import clipped_surrogate_loss, clipped_value_loss
from rlhf_lightning.stages.losses import UpdateStats, policy_denominator, policy_terms
from rlhf_lightning.types import Minibatch


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


# Three answers of 3, 1 and 2 tokens; the limit is 4. What the pad cells hold must not matter.
MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
GAINS = torch.tensor([[1.0, 2.0, 3.0], [8.0, 77.0, 77.0], [-2.0, 6.0, 77.0]])
ENTROPY = torch.tensor([[0.3, 0.6, 0.9], [2.0, 77.0, 77.0], [1.0, 3.0, 77.0]])
KL = torch.tensor([[2.0, 2.0, 2.0], [1.0, 77.0, 77.0], [0.0, 4.0, 77.0]])  # log(pi / ref)


def minibatch(rows=slice(None)) -> Minibatch:
    zero = torch.zeros(3, 3)
    fields = {
        "prompt_ids": zero.long(), "prompt_mask": MASK, "response_ids": zero.long(), "response_mask": MASK,
        "old_logprobs": zero, "ref_logprobs": -KL, "old_values": zero, "advantages": GAINS, "returns": zero,
    }  # fmt: skip
    return Minibatch(**{name: tensor[rows] for name, tensor in fields.items()})


def terms(average: str, cut=(slice(None),), **settings) -> float:
    """The loss at ratio 1 of the three answers, in the micro-batches of ``cut``."""
    config = PPOConfig(loss_average=average, **settings)
    divisor = policy_denominator(MASK, average=average, max_new_tokens=4)
    stats = UpdateStats(steps=1, epochs=1)
    return sum(
        policy_terms(
            torch.zeros(3, 3)[rows], ENTROPY[rows], minibatch(rows), config=config, beta=config.beta,
            denominator=divisor, stats=stats,
        ).item()
        for rows in cut
    )  # fmt: skip


# Sums of the answers: gains 6, 8, 4; entropies 1.8, 2, 4; k2 6, 0.5, 8.
SURROGATE = {"token": 18 / 6, "response": (6 / 3 + 8 + 4 / 2) / 3, "constant": 18 / 12}
BONUS = {"token": 7.8 / 6, "response": (0.6 + 2 + 2) / 3, "constant": 7.8 / 12}
LEASH = {"token": 14.5 / 6, "response": (2 + 0.5 + 4) / 3, "constant": 14.5 / 12}


@pytest.mark.parametrize("average", ["token", "response", "constant"])
def test_all_terms_of_the_policy_take_the_same_average(average):
    assert terms(average, beta=0.0) == pytest.approx(-SURROGATE[average])
    assert terms(average, beta=0.0, entropy_coef=0.5) == pytest.approx(
        -SURROGATE[average] - 0.5 * BONUS[average]
    )
    leashed = terms(average, beta=0.25, kl_in="loss", kl_estimator="k2")
    assert leashed == pytest.approx(-SURROGATE[average] + 0.25 * LEASH[average])


@pytest.mark.parametrize("average", ["token", "response", "constant"])
def test_the_cut_into_micro_batches_changes_no_average(average):
    options = {"beta": 0.25, "kl_in": "loss", "kl_estimator": "k2", "entropy_coef": 0.5}
    whole = terms(average, **options)
    for cut in (
        (slice(0, 1), slice(1, 3)),
        (slice(0, 2), slice(2, 3)),
        tuple(slice(i, i + 1) for i in range(3)),
    ):
        assert terms(average, cut, **options) == pytest.approx(whole)


def test_a_step_of_reinforce_on_two_arms_is_the_gradient_by_hand():
    """pi(arm 0) = 3/4 by theta = ln 3: d log pi is 1/4 for arm 0 and -3/4 for arm 1.

    Arms 0, 0, 1, 0 earn 1, 2, 4, 1 against a baseline of 1.5: gains -0.5, 0.5, 2.5, -0.5. The mean of gain
    times d log pi is (-0.125 + 0.125 - 1.875 - 0.125) / 4 = -0.5.
    """
    theta = torch.tensor(math.log(3.0), requires_grad=True)
    arms = torch.tensor([[0], [0], [1], [0]])
    mask = torch.ones(4, 1, dtype=torch.bool)
    logprobs = torch.stack([theta, torch.zeros(())]).log_softmax(0)[arms]
    gains = per_token(reinforce(torch.tensor([1.0, 2.0, 4.0, 1.0]), baseline=1.5), mask)
    zero = torch.zeros(4, 1)
    old = logprobs.detach()
    batch = Minibatch(arms, mask, arms, mask, old, old, zero, gains, zero)
    loss = policy_terms(
        logprobs, zero, batch, config=PPOConfig(), beta=0.0, denominator=4, stats=UpdateStats(1, 1)
    )
    loss.backward()
    assert theta.grad.item() == pytest.approx(0.5)
    torch.optim.SGD([theta], lr=1.0).step()
    assert theta.item() == pytest.approx(math.log(3.0) - 0.5)


def test_without_a_critic_its_figures_are_absent_and_not_zero():
    one, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    stats = UpdateStats(steps=1, epochs=1)
    stats.add_policy(
        *clipped_surrogate_loss(0 * one, old_logprobs=0 * one, advantages=one, mask=mask, clip=0.2)
    )
    stats.end_step({"policy": 1.0})
    assert not [name for name in stats.metrics() if name.startswith("critic/")]
    assert stats.metrics()["policy/loss"] == -1.0
