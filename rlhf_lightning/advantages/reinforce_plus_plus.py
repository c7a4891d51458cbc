"""REINFORCE++: returns to go, normalised over the whole batch instead of a prompt's group."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.advantages.gae import gae
from rlhf_lightning.functional.masked import masked_whiten


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, *, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every valid token, without a critic.

        G_t = r_t + γ G_{t+1},    A_t = (G_t − mean(G)) / std(G)

    Hu 2025, https://arxiv.org/abs/2501.03262. G is GAE on values of 0 at λ = 1; mean and population deviation
    run over all valid tokens of the batch, so a long response weighs more in them than a short one.

    Note: the division keeps the advantages at deviation 1 also where nothing is left to gain: the step size
    does not vanish at the optimum.

    Args:
        rewards: r_t after KL shaping, (B, T).
        mask: response mask, (B, T) bool, True where a_t was sampled and counts; padding on the right only.
        gamma: γ in [0, 1], discount a token.
    Returns:
        advantages and returns G, (B, T) each, at least float32, 0 outside the mask.
    Raises:
        ValueError: the mask is not bool or not right-padded, the shapes differ, or γ is out of range.
    """
    returns, _ = gae(rewards, values=torch.zeros_like(rewards), mask=mask, gamma=gamma, lam=1.0)
    return masked_whiten(returns, mask), returns
