"""Causal attention over rows that are padded on the right, with grouped heads.

On a CPU the products are batched matrix products: torch's flash kernel takes several times as long there
(docs/performance.md). On a GPU torch's own kernel does it. What is kept for the backward grows with
tokens and not with their square: probabilities are computed again, except those of short rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Scores alive at once, elements: a head of a long row, or all heads of several short ones. 8 MB in bfloat16
# stay in a cache.
_SCORES = 1 << 22


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k' / sqrt(d) + causal mask) v.

    Args:
        q: (B, H, L, d).
        k, v: (B, K, L, d); K divides H.
    Returns:
        (B, H, L, d). Rows past the end of a text hold numbers that nothing may read.
    """
    return attend_and_keep(q, k, v)[0]


def attend_and_keep(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """``attend``, and the probabilities (B K, g L, L) for ``attend_backward`` where all are there at once:
    on a CPU, of few short rows."""
    if q.device.type != "cpu":
        return fused(q, k, v), None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    groups, mask = _grouped(out, k), _causal(q.shape[2], q.shape[1] // k.shape[1], q.dtype)
    for part, queries, keys, values in _parts(q, k, v):
        p = _probabilities(queries, keys, mask)
        torch.bmm(p, values, out=groups[part])
    return out, p if len(p) == len(groups) else None


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

        P = softmax(S),  dV = P' dO,  dP = dO V',  dS = P (dP - rowsum(P dP)),  dQ = dS K / sqrt(d)

    Args:
        grad: (B, H, L, d), 0 where the output is not read.
        kept: the probabilities, where ``attend_and_keep`` gave them.
    """
    if q.device.type != "cpu":
        return fused_backward(grad, q, k, v)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    of_q, of_k, of_v = _grouped(grads[0], k), grads[1].flatten(0, 1), grads[2].flatten(0, 1)
    upstream, scale = _grouped(grad, k), q.shape[-1] ** -0.5
    mask = _causal(q.shape[2], q.shape[1] // k.shape[1], q.dtype)
    for part, queries, keys, values in _parts(q, k, v):
        p, g = _probabilities(queries, keys, mask) if kept is None else kept, upstream[part]
        torch.bmm(p.transpose(1, 2), g, out=of_v[part])
        ds = torch._softmax_backward_data(torch.bmm(g, values.transpose(1, 2)), p, -1, p.dtype)
        torch.bmm(ds, keys, out=of_q[part])
        torch.bmm(ds.transpose(1, 2), queries, out=of_k[part])
    return grads[0].mul_(scale), grads[1].mul_(scale), grads[2]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``attend`` by torch's kernel for the device."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def fused_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward`` by torch's kernel for the device."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(fused(*leaves), leaves, grad)  # type: ignore[return-value]


def _probabilities(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """(n, g L, d), (n, L, d) -> (n, g L, L), in the dtype of q; the softmax itself runs in float32."""
    scores = torch.baddbmm(mask.expand(len(q), -1, -1), q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.softmax(scores, dim=-1)


@lru_cache(maxsize=1)  # all layers of a pass ask for the same one
def _causal(length: int, groups: int, dtype: torch.dtype) -> Tensor:
    """(1, g L, L): 0 where a query sees a key, else -inf."""
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(length, length, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat(groups, 1).unsqueeze(0)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Heads that share keys below one another: (B, H, L, d) -> (B K, g L, d)."""
    return x.reshape(k.shape[0] * k.shape[1], -1, x.shape[-1])


def _parts(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    queries, keys, values = _grouped(q, k), k.flatten(0, 1), v.flatten(0, 1)
    step = max(1, _SCORES // (queries.shape[1] * keys.shape[1]))
    for start in range(0, len(keys), step):
        part = slice(start, start + step)
        yield part, queries[part], keys[part], values[part]
