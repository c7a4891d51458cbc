"""A straight line through measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x, by least squares."""

    slope: float
    intercept: float
    r2: float
    """Share of y's variance that the line explains; 1 where y does not vary."""


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
    """The line with the least squared distance in y.

    Raises:
        ValueError: fewer than two different x, or x and y of different lengths.
    """
    if len(x) != len(y) or len(set(x)) < 2:
        raise ValueError(f"a line needs two different x and a y for each; got {list(x)} and {list(y)}")
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    total = sum((b - mean_y) ** 2 for b in y)
    rest = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return Line(slope, intercept, 1 - rest / total if total else 1.0)
