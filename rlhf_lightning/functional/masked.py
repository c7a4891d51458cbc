"""Sums, means and whitening over the cells that count.

Every mask is bool and True where a cell counts. Cells outside the mask are *selected away* (``torch.where``)
before any arithmetic and never multiplied away: NaN * 0 is NaN, forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A spread below these is the rounding of float32, not a signal: it is not blown up to deviation 1.
_SMALLEST_STD = 1e-6
_SMALLEST_RELATIVE_STD = 1e-7


def check_mask(mask: Tensor, **tensors: Tensor) -> None:
    """Refuse a mask that is not bool, or tensors of another shape than the mask's.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be a bool tensor, True where a cell counts; got dtype {mask.dtype}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            expected, given = tuple(mask.shape), tuple(tensor.shape)
            raise ValueError(f"{name} must have the mask's shape {expected}; got {given}")


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 where it already is; any shape."""
    return x if x.dtype == torch.float64 else x.float()


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the mask is True, else 0, at least float32; no gradient passes through the other cells."""
    return torch.where(mask, at_least_float32(x), 0.0)


def divide_by_count(total: Tensor, count: Tensor, denominator: Tensor | float | None) -> Tensor:
    """``total / denominator``; None means ``count``. A denominator of 0 (no cell at all) divides by 1.

    Note: the denominator may lie below 1 (tokens of the step / ranks, where gradients are averaged over
    ranks).
    """
    chosen = count if denominator is None else denominator
    divisor = torch.as_tensor(chosen, dtype=total.dtype, device=total.device)
    return total / torch.where(divisor == 0, 1.0, divisor)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``x`` over the mask, scalar.

    Args:
        x: any shape.
        mask: bool, the shape of ``x``, True where a cell counts.
    Raises:
        ValueError: the mask is not bool or the shapes differ.
    """
    check_mask(mask, x=x)
    return keep(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` over the mask, scalar; 0 where the mask is empty.

    Args:
        x: any shape.
        mask: bool, the shape of ``x``, True where a cell counts.
    Raises:
        ValueError: the mask is not bool or the shapes differ.
    """
    return divide_by_count(masked_sum(x, mask), mask.sum(), None)


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """(count, Σx, Σx²) over the mask, (3,) float64: add these over ranks, empty ranks included, then whiten.

    Args:
        x: any shape.
        mask: bool, the shape of ``x``, True where a cell counts.
    Raises:
        ValueError: the mask is not bool or the shapes differ.
    """
    check_mask(mask, x=x)
    valid = keep(x, mask).double()
    return torch.stack([mask.sum().double(), valid.sum(), valid.square().sum()])


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance, float64 scalars, from (count, Σx, Σx²); both 0 where the count is 0."""
    count, total, squares = moments.double().unbind()
    mean = divide_by_count(total, count, None)
    return mean, (divide_by_count(squares, count, None) - mean.square()).clamp(min=0.0)


def safe_std(mean: Tensor, variance: Tensor) -> Tensor:
    """σ, but never below what float32 can tell from rounding: max(σ, 1e-6, 1e-7 |mean|). NaN stays NaN."""
    smallest = (mean.abs() * _SMALLEST_RELATIVE_STD).clamp(min=_SMALLEST_STD)
    return torch.maximum(variance, smallest.square()).sqrt()


def masked_whiten(x: Tensor, mask: Tensor, *, center: bool = True, moments: Tensor | None = None) -> Tensor:
    """Scale ``x`` to deviation 1 over the mask and, with ``center``, to mean 0.

        x̂ = (x − μ) / σ        (center=False:  x / σ, the mean is scaled and not taken away)

    μ and σ² are the mean and the *population* variance of the True cells. A spread below float32's rounding
    (see ``safe_std``) is not blown up, so constant input gives 0.

    Args:
        x: any shape.
        mask: bool, the shape of ``x``, True where a cell counts.
        center: True for mean 0.
        moments: (3,), ``masked_moments`` summed over all ranks; None: of this tensor alone.
    Returns:
        The shape of ``x``, float32 (float64 for float64). Cells outside the mask are 0. All 0 where the
        moments count fewer than two cells, for one cell has no spread.
    Raises:
        ValueError: the mask is not bool or the shapes differ.
    """
    check_mask(mask, x=x)
    valid = keep(x, mask).double()
    if moments is None:
        count = mask.sum()
        mean = divide_by_count(valid.sum(), count, None)
        # Two passes: here the mean is at hand, so a large one costs no digits.
        variance = divide_by_count(torch.where(mask, valid - mean, 0.0).square().sum(), count, None)
    else:
        count = moments[0]
        mean, variance = mean_and_variance(moments)
    shifted = valid - mean if center else valid
    whitened = shifted / safe_std(mean, variance)
    return torch.where(mask & (count >= 2), whitened, 0.0).to(at_least_float32(x).dtype)
