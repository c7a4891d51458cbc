"""One token from one distribution and one uniform number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlhf_lightning.randomness import counted_seed


def uniforms(rows: list[int], length: int, *, seed: int, iteration: int) -> Tensor:
    """u[row, t] in [0, 1) for a whole rollout, (len(rows), length) float64 on the CPU.

    A row's numbers depend on (seed, iteration, row) alone: not on rank, batch, or who finished before.
    """
    seeds = (counted_seed(seed, "sample", iteration, row) for row in rows)
    drawn = [np.random.Generator(np.random.Philox(s)).random(length) for s in seeds]
    return torch.from_numpy(np.stack(drawn)) if drawn else torch.zeros(0, length, dtype=torch.float64)


def filter_logits(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Keep the ``top_k`` likeliest tokens, then the fewest of them that hold ``top_p`` of what is left.

    Args:
        logits: (N, V).
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
    Returns:
        Logits with -inf at the tokens that are out, (N, V).
    """
    if top_k and top_k < logits.shape[1]:
        least = logits.topk(top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1.0:
        ranked, order = logits.sort(dim=1, descending=True)
        probabilities = ranked.softmax(dim=1)
        before = probabilities.cumsum(dim=1) - probabilities
        out = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(out, float("-inf"))
    return logits


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution of ``softmax(logits)`` at ``u``.

    The sum runs in float64: over 50,000 tokens a float32 sum drifts by more than a rare token's probability.

    Args:
        logits: (N, V) float32.
        u: (N,) in [0, 1).
    Returns:
        Token ids (N,) int64; a token of probability 0 is never drawn.
    """
    weights = (logits - logits.max(dim=1, keepdim=True).values).exp()
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    target = u.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
