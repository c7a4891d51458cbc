"""Plain REINFORCE: the score minus a baseline, and the running baseline."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32


def reinforce(scores: Tensor, *, baseline: Tensor | float | None = None) -> Tensor:
    """Advantage of every response.

        A_i = s_i − b_i

    Williams 1992, https://doi.org/10.1007/BF00992696. Any b that does not depend on the response keeps the
    gradient unbiased; the batch mean, which holds a share 1/B of the response itself, shrinks it by (1 −
    1/B).

    Args:
        scores: s, one a response, (B,).
        baseline: b, a number for all or (B,), a running mean for instance; None: the mean of ``scores``.
    Returns:
        (B,), at least float32; spread it with ``per_token``.
    Raises:
        ValueError: scores are not one row, or the baseline has another shape.
    """
    if scores.ndim != 1:
        raise ValueError(f"scores must have shape (B,); got {tuple(scores.shape)}")
    wide = at_least_float32(scores)
    level = (
        wide.mean() if baseline is None else torch.as_tensor(baseline, dtype=wide.dtype, device=wide.device)
    )
    if level.ndim and level.shape != wide.shape:
        raise ValueError(
            f"baseline must be a number or have shape {tuple(wide.shape)}; got {tuple(level.shape)}"
        )
    return wide - level


class RunningBaseline:
    """Decayed mean of what earlier iterations scored.

        b_1 = m_0,    b_{k+1} = d b_k + (1 − d) m_k

    m_k is the mean score of iteration k. ``value`` is None before the first: there is no earlier score.
    """

    def __init__(self) -> None:
        self.value: float | None = None

    def update(self, scores: Tensor, *, decay: float) -> None:
        """Take in one iteration's scores, any shape; call it after its advantages are made.

        Args:
            decay: d in [0, 1), share of the old baseline that stays.
        Raises:
            ValueError: the scores are empty or not finite, which would poison the baseline for good.
        """
        mean = scores.double().mean().item()
        if not math.isfinite(mean):
            raise ValueError(f"the mean of the scores must be finite; got {mean}")
        self.value = mean if self.value is None else decay * self.value + (1 - decay) * mean

    def state_dict(self) -> dict[str, float | None]:
        """A plain number for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        self.value = state["value"]
