"""What the estimators over groups share: the groups themselves, and the way from a response to its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32, check_mask


def as_groups(scores: Tensor, group_size: int) -> Tensor:
    """(B,) scores whose groups are adjacent rows, as (B / group_size, group_size), at least float32.

    Raises:
        ValueError: the scores are not one row, the size is below 2, or it does not divide B.
    """
    if scores.ndim != 1:
        raise ValueError(f"scores must have shape (B,); got {tuple(scores.shape)}")
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, a baseline needs other answers; got {group_size}")
    if scores.numel() % group_size:
        raise ValueError(
            f"group_size must divide the number of scores; got {group_size} and {scores.numel()}"
        )
    return at_least_float32(scores).view(-1, group_size)


def per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """A response's advantage on each of its tokens: A_t = A for every valid t.

    Args:
        advantages: A, (B,).
        mask: response mask, (B, T) bool, True where a token was sampled and counts.
    Returns:
        (B, T), at least float32, 0 outside the mask.
    Raises:
        ValueError: the mask is not bool or the shapes do not belong together.
    """
    check_mask(mask)
    if advantages.shape != mask.shape[:1]:
        raise ValueError(f"advantages must have shape {tuple(mask.shape[:1])}; got {tuple(advantages.shape)}")
    return torch.where(mask, at_least_float32(advantages).unsqueeze(1), 0.0)
