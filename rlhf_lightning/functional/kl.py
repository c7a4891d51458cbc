"""KL from the reference: its estimators, its place in the reward, and the controller of its weight."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32, check_mask, keep

KLKind = Literal["k1", "k2", "k3"]

_LARGEST_EXPONENT = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLKind = "k1") -> Tensor:
    """Per-token estimates of KL(π ‖ π_ref) from tokens sampled by π.

        k1 = log π − log π_ref        unbiased, may be negative
        k2 = k1² / 2                  biased, >= 0
        k3 = exp(−k1) − 1 + k1        unbiased, >= 0

    Schulman 2020, http://joschu.net/blog/kl-approx.html. The exponent of k3 is cut at 20, so it stays finite.

    Note: differentiated as a *loss* over sampled tokens, k1 is no leash at all: its gradient is ∇ log π,
    whose mean is 0 whatever the reference. k2's gradient, k1 ∇ log π, is that of KL(π ‖ π_ref),
    and k3's that of the reversed KL(π_ref ‖ π).

    Args:
        logprobs: log π(a_t|s_t), any shape.
        ref_logprobs: log π_ref(a_t|s_t), the same shape.
        kind: the estimator.
    Returns:
        The shape of ``logprobs``, at least float32, nats.
    Raises:
        ValueError: the shapes differ, or the kind is unknown.
    """
    if logprobs.shape != ref_logprobs.shape:
        expected, given = tuple(logprobs.shape), tuple(ref_logprobs.shape)
        raise ValueError(f"ref_logprobs must have shape {expected}; got {given}")
    k1 = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    if kind == "k1":
        return k1
    if kind == "k2":
        return k1.square() / 2
    if kind == "k3":
        return torch.expm1((-k1).clamp(max=_LARGEST_EXPONENT)) + k1
    raise ValueError(f"kind must be k1, k2 or k3; got {kind!r}")


def kl_shaped_rewards(scores: Tensor, *, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Per-token rewards: the score at the last valid token, minus β times the KL at every valid token.

        r_t = score · [t = last valid token] − β kl_t

    Ziegler et al. 2019, section 2, https://arxiv.org/abs/1909.08593. The last valid token is the end token
    where one was sampled, never the pad slot behind it. A row without valid tokens gets nothing.

    Args:
        scores: what the reward gave each response, (B,).
        kl: kl_t, (B, T), nats.
        mask: response mask, (B, T) bool, True where a token was sampled and counts.
        beta: β, score units per nat.
    Returns:
        (B, T), at least float32, 0 outside the mask.
    Raises:
        ValueError: the mask is not bool or the shapes differ.
    """
    check_mask(mask, kl=kl)
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores must have shape {tuple(mask.shape[:1])}; got {tuple(scores.shape)}")
    valid_from_here = mask.flip(dims=[1]).cumsum(dim=1).flip(dims=[1])
    last = mask & (valid_from_here == 1)
    return keep(scores.unsqueeze(1).expand(mask.shape), last) - beta * keep(kl, mask)


class AdaptiveBeta:
    """β that steers the KL of a response towards a target, or, without a target, β that never moves.

        e = clip(KL / target − 1, −0.2, 0.2),    β ← β (1 + e · min(responses / horizon, 1))

    Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593; the min is added here, so that one
    update changes β by a fifth at most and can never turn its sign.

    Args:
        beta: first value, >= 0.
        target: nats a response, > 0; None keeps ``beta`` for ever.
        horizon: responses over which the controller acts, > 0.
    Raises:
        ValueError: a number out of its range.
    """

    def __init__(self, beta: float, *, target: float | None, horizon: float) -> None:
        if not beta >= 0:
            raise ValueError(f"beta must be at least 0; got {beta}")
        if target is not None and not target > 0:
            raise ValueError(f"target must be above 0 nats a response; got {target}")
        if not horizon > 0:
            raise ValueError(f"horizon must be above 0 responses; got {horizon}")
        self.beta = float(beta)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, responses: int) -> float:
        """Take in one iteration's mean KL (nats a response) over ``responses`` answers; returns the new β.

        Raises:
            ValueError: the KL is not finite, which would poison β for good.
        """
        if self.target is None:
            return self.beta
        if not math.isfinite(kl):
            raise ValueError(f"kl must be finite; got {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.beta *= 1 + error * min(responses / self.horizon, 1.0)
        return self.beta

    def state_dict(self) -> dict[str, float]:
        """Plain numbers for a checkpoint; target and horizon belong to the config."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved β. Without a target β stays what the config says: fixed means fixed."""
        if self.target is not None:
            self.beta = float(state["beta"])
