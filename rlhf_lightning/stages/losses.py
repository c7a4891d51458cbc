"""The terms of one micro-batch's loss, and the figures of a whole update."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rlhf_lightning.config.algorithms import LossAverage, PPOConfig
from rlhf_lightning.functional.kl import kl_estimate
from rlhf_lightning.functional.policy_losses import (
    SurrogateStats,
    ValueStats,
    clipped_surrogate_loss,
    clipped_value_loss,
    weighted_sum,
)
from rlhf_lightning.types import Minibatch


@dataclass
class UpdateStats:
    """What an iteration's optimizer steps add up to."""

    steps: int
    """Optimizer steps planned."""
    epochs: int
    """Epochs planned."""
    done: int = 0
    """Optimizer steps taken."""
    policy: SurrogateStats | None = None
    critic: ValueStats | None = None
    step: SurrogateStats | None = None
    """The policy's figures of the step under way."""
    pending: dict[str, float] = field(default_factory=lambda: {"policy": 0.0, "critic": 0.0})
    """Losses of the step under way: they count once it is taken, for ``target_kl`` may call it off."""
    losses: dict[str, float] = field(default_factory=lambda: {"policy": 0.0, "critic": 0.0})
    norms: dict[str, float] = field(default_factory=lambda: {"policy": 0.0, "critic": 0.0})

    def add_policy(self, loss: Tensor, stats: SurrogateStats) -> None:
        self.pending["policy"] += loss.item()
        self.step = self.step.merge(stats) if self.step else stats
        self.policy = self.policy.merge(stats) if self.policy else stats

    def add_critic(self, loss: Tensor, stats: ValueStats) -> None:
        self.pending["critic"] += loss.item()
        self.critic = self.critic.merge(stats) if self.critic else stats

    def end_step(self, norms: dict[str, float]) -> None:
        self.done += 1
        self.step = None
        for role, norm in norms.items():
            self.norms[role] += norm
            self.losses[role] += self.pending[role]
            self.pending[role] = 0.0

    def metrics(self) -> dict[str, float]:
        """Losses and gradient norms are means over the steps taken, ratios and fractions over tokens.

        The tokens of a step that ``target_kl`` called off count: their KL is why the epochs ended.
        An iteration in which the policy did not learn (critic warm-up) has ratio 1 and no clipping. Without a
        critic there is no figure of one.
        """
        done = max(self.done, 1)
        policy, critic = self.policy, self.critic
        figures = {
            "policy/loss": self.losses["policy"] / done,
            "policy/approx_kl": float(policy.approx_kl) if policy else 0.0,
            "policy/clip_fraction": float(policy.clip_fraction) if policy else 0.0,
            "policy/ratio_mean": float(policy.ratio_mean) if policy else 1.0,
            "policy/ratio_max": float(policy.ratio_max) if policy else 1.0,
            "policy/grad_norm": self.norms["policy"] / done,
            "ppo/epochs_done": self.done * self.epochs / self.steps,
        }
        if critic is not None:
            figures["critic/loss"] = self.losses["critic"] / done
            figures["critic/clip_fraction"] = float(critic.clip_fraction)
            figures["critic/grad_norm"] = self.norms["critic"] / done
        return figures


def policy_denominator(mask: Tensor, *, average: LossAverage, max_new_tokens: int) -> int:
    """What the policy's sums over one optimizer step are divided by, see ``policy_terms``.

    Args:
        mask: response mask of all rows of the step, (b, T) bool.
    """
    match average:
        case "token":
            return int(mask.sum())
        case "response":
            return len(mask)
        case "constant":
            return len(mask) * max_new_tokens


def policy_terms(
    logprobs: Tensor,
    entropy: Tensor | None,
    batch: Minibatch,
    *,
    config: PPOConfig,
    beta: float,
    denominator: int,
    stats: UpdateStats,
) -> Tensor:
    """Clipped surrogate, minus the entropy bonus, plus the KL where it sits in the loss.

    All three are averaged by ``ppo.loss_average``:

        token      1/N Σ_i Σ_t x_it              N tokens of the step: each token weighs the same
        response   1/R Σ_i 1/T_i Σ_t x_it        R responses: each weighs the same (GRPO)
        constant   1/(R L) Σ_i Σ_t x_it          L the length limit: no length in it (Dr. GRPO)

    Args:
        entropy: needed for the bonus alone.
        batch: a part of the step; its masks hold whole responses.
        denominator: of the whole step, see ``policy_denominator``.
    """
    mask = batch.response_mask
    weights = 1 / mask.sum(dim=1).clamp(min=1) if config.loss_average == "response" else None
    loss, figures = clipped_surrogate_loss(
        logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=mask,
        clip=config.clip,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        ratio_of=config.ratio,
        weights=weights,
        denominator=denominator,
    )
    stats.add_policy(loss, figures)
    if config.entropy_coef:
        assert entropy is not None
        loss = loss - config.entropy_coef * weighted_sum(entropy, mask, weights) / denominator
    if config.kl_in == "loss" and beta:
        kl = kl_estimate(logprobs, batch.ref_logprobs, kind=config.kl_estimator)
        loss = loss + beta * weighted_sum(kl, mask, weights) / denominator
    return loss


def value_terms(
    values: Tensor, batch: Minibatch, *, config: PPOConfig, denominator: int, stats: UpdateStats
) -> Tensor:
    """Clipped value loss times its coefficient. ``values`` (b, T' + 1): the last column is not used."""
    loss, figures = clipped_value_loss(
        values[:, :-1],
        old_values=batch.old_values,
        returns=batch.returns,
        mask=batch.response_mask,
        clip=config.clip_value,
        denominator=denominator,
    )
    stats.add_critic(loss, figures)
    return config.vf_coef * loss
