"""Who wins, by how much, and how sure that is: figures over prompts with bootstrap confidence intervals."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 2**22  # drawn numbers held at a time


def wins(a: Tensor, b: Tensor) -> Tensor:
    """1 where ``a`` scored more than ``b``, 0 where less, one half where they tie; float64, any shape.

    So ``wins(a, b) + wins(b, a)`` is 1 everywhere.

    Raises:
        ValueError: the shapes differ: which answers were compared would be a guess.
    """
    if a.shape != b.shape:
        raise ValueError(f"scores of shapes {tuple(a.shape)} and {tuple(b.shape)} do not pair up")
    return (a > b).double() + 0.5 * (a == b).double()


def win_rate(a: Tensor, b: Tensor) -> float:
    """Mean of ``wins``: 0.5 where two are alike. ``win_rate(a, b) + win_rate(b, a) == 1``."""
    return float(wins(a, b).mean())


def bootstrap_interval(
    values: Tensor, *, seed: int, resamples: int, confidence: float
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron and Tibshirani 1993, chapter 13).

    Prompts are drawn again with replacement, each with all its answers, since answers to one prompt are not
    independent of each other.

    Args:
        values: a figure of each answer: (P,), or (P, S) for S answers to each of P prompts.
        seed: of the draws; the same seed takes the same prompts, so that figures of one evaluation move
            together.
        resamples: draws of P prompts.
        confidence: level, such as 0.95.

    Returns:
        Lower and upper bound of the mean.

    Raises:
        ValueError: there are no values.
    """
    if values.numel() == 0:
        raise ValueError("there is nothing to resample")
    means = values.double().cpu().reshape(len(values), -1).mean(dim=1)
    count = len(means)
    generator = torch.Generator().manual_seed(seed)
    size = max(1, _AT_ONCE // count)
    drawn = [
        means[torch.randint(count, (min(size, resamples - start), count), generator=generator)].mean(dim=1)
        for start in range(0, resamples, size)
    ]
    tail = (1.0 - confidence) / 2.0
    low, high = torch.cat(drawn).quantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return low, high
