"""Whether the probabilities of a preference model mean what they say, and what else its scores depend on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32


class Reliability(NamedTuple):
    """Pairs sorted into bins of equal width by how sure the model was, from 0.5 to 1."""

    confidence: Tensor  # (bins,), mean of max(p, 1 - p); NaN where a bin is empty
    accuracy: Tensor  # (bins,), share of pairs that the model ordered as the label does; ties count half
    pairs: Tensor  # (bins,) int64, how many

    @property
    def error(self) -> float:
        """Expected calibration error, Σ_b n_b / N |accuracy_b − confidence_b|.

        Guo et al. 2017, eq. 3, https://arxiv.org/abs/1706.04599.
        """
        gaps = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return float((self.pairs * gaps).sum() / self.pairs.sum())


def ordered_right(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Which pairs the scores order as the label does, (N,) float64: 1, 0, and 1/2 where they are equal."""
    return 0.5 * (1 + (chosen.double() - rejected.double()).sign())


def reliability(chosen: Tensor, rejected: Tensor, *, bins: int = 10) -> Reliability:
    """How often the model is right, by how sure it is.

    The model's probability that the chosen answer wins is p = σ(r_chosen − r_rejected) (Bradley and Terry
    1952). Which side is called chosen carries nothing, so the pairs are folded: confidence max(p, 1 − p),
    right where p > 1/2.

    Args:
        chosen: scores of the preferred answers, (N,).
        rejected: scores of the others, (N,).
        bins: of equal width over [0.5, 1].
    Raises:
        ValueError: the shapes differ, there are no pairs or no bins.
    """
    if chosen.shape != rejected.shape or chosen.ndim != 1 or not len(chosen):
        raise ValueError(f"need two rows of scores alike; got {tuple(chosen.shape)}, {tuple(rejected.shape)}")
    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}")
    lead = at_least_float32(chosen).double() - at_least_float32(rejected).double()
    confidence = torch.sigmoid(lead.abs())
    right = ordered_right(chosen, rejected)
    place = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    count = torch.bincount(place, minlength=bins)
    mean = [torch.bincount(place, weights=x, minlength=bins) / count for x in (confidence, right)]
    return Reliability(mean[0], mean[1], count)


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two rows (N,), in [-1, 1]; 0 where one of them does not vary."""
    a, b = (at_least_float32(values).double() - at_least_float32(values).double().mean() for values in (x, y))
    norm = float(a.norm() * b.norm())
    return float((a * b).sum()) / norm if norm > 0 else 0.0


def wilson_interval(successes: float, total: int, *, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a share, also near 0 and 1 and for few trials (Wilson 1927).

    Args:
        successes: how many of ``total``; halves stand for ties.
        total: trials, at least 1.
        z: quantile of the normal distribution: 1.96 for 95 %.
    """
    share = successes / total
    scale = 1 + z * z / total
    middle = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)
