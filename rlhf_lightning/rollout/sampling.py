"""One token from one distribution and one uniform number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.randomness import counted_seed

_BLOCK = 256  # tokens; about the square root of a vocabulary, where the two levels cost the same


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


def draw(logits: Tensor, u: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Invert the cumulative distribution of ``softmax(logits / temperature)`` at ``u``.

    Two levels: the block of tokens that ``u`` falls into, by sums over blocks, then the token in that block.
    Sums run on in float64: over 50,000 tokens a float32 sum drifts by more than a rare token's probability.
    Within a block float32 is as exact as the probabilities themselves.
    A row's token does not depend on the rows beside it.

    Args:
        logits: (N, V) of any float type, left as they are.
        u: (N,) in [0, 1).
        temperature: above 0; 1 where the logits are divided already.
    Returns:
        Token ids (N,) int64; a token of probability 0 is never drawn.
    """
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // _BLOCK)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        wide = wide / temperature
    weights = torch.softmax(wide, dim=1)
    if blocks * _BLOCK != vocabulary:
        weights = pad(weights, (0, blocks * _BLOCK - vocabulary))
    weights = weights.view(rows, blocks, _BLOCK)
    cumulative = weights.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    target = u.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    block = _place(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = weights.gather(1, block.unsqueeze(2).expand(-1, 1, _BLOCK)).squeeze(1)
    token = _place(inside.cumsum(dim=1, dtype=torch.float64), target - before)
    return (block * _BLOCK + token).squeeze(1)


def _place(cumulative: Tensor, target: Tensor) -> Tensor:
    """First place whose sum passes the target, (N, 1); where rounding puts the target on or past the last,
    the last place that adds to the sum."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
