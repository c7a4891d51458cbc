"""Plain REINFORCE: the score minus a baseline."""

from __future__ import annotations

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
