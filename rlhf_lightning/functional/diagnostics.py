"""What tells whether the critic learns."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32, masked_moments, mean_and_variance, safe_std


def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Moments of R − V (row 0) and of R (row 1), (2, 3) float64: add them over ranks or batches.

    Args:
        values: V_t, (B, T).
        returns: R_t, (B, T).
        mask: response mask, (B, T) bool, True where a_t was sampled and counts.
    Raises:
        ValueError: the mask is not bool or the shapes differ.
    """
    errors = at_least_float32(returns) - at_least_float32(values)
    return torch.stack([masked_moments(errors, mask), masked_moments(returns, mask)])


def explained_variance_from_moments(moments: Tensor) -> Tensor:
    """1 − Var[R − V] / Var[R] from (2, 3) summed moments, float32 scalar; NaN for constant R."""
    _, unexplained = mean_and_variance(moments[0])
    mean, variance = mean_and_variance(moments[1])
    constant = variance.sqrt() < safe_std(mean, variance)
    return torch.where(constant, float("nan"), 1 - unexplained / variance).float()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the returns' variance that the critic explains.

        EV = 1 − Var[R − V] / Var[R]

    1: perfect but for a constant offset; 0: no better than a constant; below 0: worse. NaN where the returns
    do not vary (an empty mask included), for then the question has no answer.

    Args:
        values: V_t, (B, T).
        returns: R_t, (B, T).
        mask: response mask, (B, T) bool, True where a_t was sampled and counts.
    Returns:
        float32 scalar.
    Raises:
        ValueError: the mask is not bool or the shapes differ.
    """
    return explained_variance_from_moments(explained_variance_moments(values, returns, mask))
