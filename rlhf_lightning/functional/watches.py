"""Has a run's figure moved for good, or is that its noise? Plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


def start_of(values: Sequence[float], window: int) -> float | None:
    """Mean of the first ``window`` values; None until there are so many."""
    return sum(values[:window]) / window if len(values) >= window else None


def noise(values: Sequence[float]) -> float:
    """Standard deviation of one value around a slow trend, from the differences of neighbours.

        s² = Σ (x_{k+1} − x_k)² / 2(n − 1)

    von Neumann, Kent, Bellinson and Hart 1941, "The mean square successive difference". A trend hardly enters
    it, as it would the ordinary variance; where it does, s is too large: ``parting`` is later, never rash.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"noise needs two values, got {len(values)}")
    squares = sum((values[k + 1] - values[k]) ** 2 for k in range(len(values) - 1))
    return math.sqrt(squares / (2 * (len(values) - 1)))


class Parting(NamedTuple):
    """How one figure fell from its best while another rose."""

    fall: float
    """Mean of ``window`` values at the best, minus that of the last ``window``."""
    standard_errors: float
    """The fall in standard errors of a difference of two such means."""


def parting(scores: Sequence[float], seconds: Sequence[float], *, window: int) -> Parting | None:
    """How far ``seconds`` fell from its best stretch while ``scores`` rose since then.

    A stretch is the mean of ``window`` neighbours. The best one is the highest of ``seconds`` that ends
    before the last stretch begins. Over-optimisation of a proxy looks so (Gao et al. 2022,
    https://arxiv.org/abs/2210.10760).

    Args:
        scores: what is trained for, one value an iteration.
        seconds: what is only watched, as many.
        window: values in a stretch, >= 1.
    Returns:
        None where there are fewer than two stretches, ``seconds`` did not fall, or ``scores`` did not rise.
    """
    if len(seconds) < 2 * window:
        return None
    stretches = [sum(seconds[i : i + window]) / window for i in range(len(seconds) - 2 * window + 1)]
    best = max(range(len(stretches)), key=stretches.__getitem__)
    fall = stretches[best] - sum(seconds[-window:]) / window
    rise = sum(scores[-window:]) - sum(scores[best : best + window])
    if fall <= 0 or rise <= 0:
        return None
    return Parting(
        fall, fall / (noise(seconds) * math.sqrt(2 / window))
    )  # who fell has neighbours that differ
