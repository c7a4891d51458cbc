"""Generalised advantage estimation over right-padded responses."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32, check_mask, keep


@torch.no_grad()
def gae(
    rewards: Tensor,
    *,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every valid token.

        δ_t = r_t + γ V_{t+1} − V_t,    A_t = δ_t + γ λ A_{t+1},    R_t = A_t + V_t

    Schulman et al. 2015, eq. 16, https://arxiv.org/abs/1506.02438. Behind the last valid token A is 0 and V
    is ``last_values``, wherever in the row that token sits; what the pad cells hold is never read. No
    gradient passes: advantages and returns are constants of the update.

    Args:
        rewards: r_t after KL shaping, (B, T).
        values: V(s_t), before a_t is seen, (B, T).
        mask: response mask, (B, T) bool, True where a_t was sampled and counts; padding on the right only.
        gamma: γ in [0, 1], discount a token.
        lam: λ in [0, 1]; 0: one-step errors, 1: return minus value.
        last_values: V after the last token, (B,): 0 where the response ended, a bootstrap where it was cut.
            None: 0.
    Returns:
        advantages and returns, (B, T) each, at least float32, 0 outside the mask; not whitened.
    Raises:
        ValueError: the mask is not bool or not right-padded, the shapes differ, or γ or λ is out of range.
    """
    check_mask(mask, rewards=rewards, values=values)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must lie in [0, 1]; got {number}")
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("mask must be right-padded: a valid token follows a pad cell")
    if last_values is not None and last_values.shape != mask.shape[:1]:
        raise ValueError(
            f"last_values must have shape {tuple(mask.shape[:1])}; got {tuple(last_values.shape)}"
        )

    reward, value = keep(rewards, mask), keep(values, mask)
    advantages = torch.zeros_like(value)
    carry = value.new_zeros(mask.shape[0])
    next_value = carry if last_values is None else at_least_float32(last_values)
    for t in reversed(range(mask.shape[1])):
        valid = mask[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        carry = torch.where(valid, delta + gamma * lam * carry, 0.0)
        next_value = torch.where(valid, value[:, t], next_value)
        advantages[:, t] = carry
    return advantages, advantages + value
