"""Learning rates over a run, in optimizer steps."""

from __future__ import annotations

import math


def rate_factor(step: int, *, total: int, warmup: int, schedule: str) -> float:
    """Share of the peak learning rate at optimizer step ``step`` of ``total``, counted from 0.

    Linear warm-up over the first ``warmup`` steps, then constant, or linear or cosine to 0 at step ``total``.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
