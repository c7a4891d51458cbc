"""The terms of one micro-batch's loss, and the figures of a whole update."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rlhf_lightning.config.schema import PPOConfig
from rlhf_lightning.functional.kl import kl_estimate
from rlhf_lightning.functional.masked import masked_sum
from rlhf_lightning.functional.policy_losses import clipped_surrogate_loss, clipped_value_loss
from rlhf_lightning.types import Minibatch


@dataclass
class UpdateStats:
    """Sums over the optimizer steps of one iteration. Counts are tokens unless named otherwise."""

    steps: int
    epochs: int
    done: int = 0
    step_approx_kl: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    ratio_max: float = 0.0
    _step: dict[str, float] = field(default_factory=dict)

    def begin_step(self) -> None:
        self._step = {}
        self.step_approx_kl = 0.0

    def add(self, **figures: float) -> None:
        for name, value in figures.items():
            self._step[name] = self._step.get(name, 0.0) + value
        if self._step.get("policy_tokens"):
            self.step_approx_kl = self._step["approx_kl"] / self._step["policy_tokens"]

    def end_step(self, norms: dict[str, float]) -> None:
        self.done += 1
        for name, value in (self._step | {f"{role}_grad_norm": norm for role, norm in norms.items()}).items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Losses and gradient norms are means over steps; ratios and fractions are means over tokens."""

        def mean(name: str, over: str | None = None) -> float:
            count = self.sums.get(over, 0.0) if over else self.done
            return self.sums.get(name, 0.0) / count if count else 0.0

        return {
            "policy/loss": mean("policy_loss"),
            "policy/approx_kl": mean("approx_kl", "policy_tokens"),
            "policy/clip_fraction": mean("policy_clipped", "policy_tokens"),
            "policy/ratio_mean": mean("ratio", "policy_tokens") if self.sums.get("policy_tokens") else 1.0,
            "policy/ratio_max": self.ratio_max or 1.0,
            "policy/grad_norm": mean("policy_grad_norm"),
            "critic/loss": mean("critic_loss"),
            "critic/clip_fraction": mean("critic_clipped", "critic_tokens"),
            "critic/grad_norm": mean("critic_grad_norm"),
            "ppo/epochs_done": self.done * self.epochs / self.steps,
        }


def policy_terms(
    logprobs: Tensor, entropy: Tensor, batch: Minibatch, config: PPOConfig, beta: float, denominator: int, stats: UpdateStats
) -> Tensor:
    """Clipped surrogate, minus the entropy bonus, plus the KL where it sits in the loss."""
    mask = batch.response_mask
    loss, figures = clipped_surrogate_loss(
        logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=mask,
        clip=config.clip,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        denominator=denominator,
    )
    stats.add(
        policy_loss=loss.item(),
        approx_kl=float(figures.approx_kl_sum),
        policy_clipped=float(figures.clipped_count),
        ratio=float(figures.ratio_sum),
        policy_tokens=float(figures.count),
    )
    stats.ratio_max = max(stats.ratio_max, float(figures.ratio_max))
    if config.entropy_coef:
        loss = loss - config.entropy_coef * masked_sum(entropy, mask) / denominator
    if config.kl_in == "loss" and beta:
        kl = kl_estimate(logprobs, batch.ref_logprobs, kind=config.kl_estimator)
        loss = loss + beta * masked_sum(kl, mask) / denominator
    return loss


def value_terms(values: Tensor, batch: Minibatch, config: PPOConfig, denominator: int, stats: UpdateStats) -> Tensor:
    """Clipped value loss times its coefficient."""
    loss, figures = clipped_value_loss(
        values,
        old_values=batch.old_values,
        returns=batch.returns,
        mask=batch.response_mask,
        clip=config.clip_value,
        denominator=denominator,
    )
    stats.add(critic_loss=loss.item(), critic_clipped=float(figures.clipped_count), critic_tokens=float(figures.count))
    return config.vf_coef * loss
