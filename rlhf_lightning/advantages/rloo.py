"""REINFORCE with the other answers to the same prompt as the baseline."""

from __future__ import annotations

from torch import Tensor

from rlhf_lightning.advantages.groups import as_groups


def rloo(scores: Tensor, *, group_size: int) -> Tensor:
    """Leave-one-out advantage of every response.

        A_i = s_i − 1/(k−1) Σ_{j≠i} s_j

    Ahmadian et al. 2024, section 3.2, https://arxiv.org/abs/2402.14740.

    Args:
        scores: s, one a response (with the response's KL penalty where it belongs to the reward), (B,); the k
            answers to one prompt are adjacent rows.
        group_size: k >= 2.
    Returns:
        (B,), at least float32; spread it with ``per_token``.
    Raises:
        ValueError: k is below 2 or does not divide B.
    """
    groups = as_groups(scores, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()
