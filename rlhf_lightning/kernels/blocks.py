"""The two halves of a decoder layer as differentiable functions of packed tokens.

    x <- x + W_o attention(rotate(W_qkv norm(x)))
    x <- x + W_down (silu(W_gate norm(x)) * W_up norm(x))

Gradients go to the input and to the adapter's low-rank terms; everything else is frozen. Kept for the
backward: the input, and (unless ``lean``) queries, keys, values and the attention's output, or gate and up.
Norms and products of gate and up are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_lightning.kernels.attention import attend, attend_backward
from rlhf_lightning.kernels.linears import Linears, Low
from rlhf_lightning.kernels.packing import Packing
from rlhf_lightning.kernels.pointwise import gated, gated_backward, rms_norm, rms_norm_backward, rotate


@dataclass(frozen=True)
class Tokens:
    """What all layers of one pass share."""

    packing: Packing
    cos: Tensor  # (N, 1, d / 2)
    sin: Tensor  # (N, 1, d / 2)


@dataclass(frozen=True)
class AttentionHalf:
    """Frozen parts and low-rank terms of a layer's first half, under one adapter."""

    norm: Tensor  # (H,)
    eps: float
    qkv: Linears
    out: Linears
    heads: int
    key_heads: int
    head_size: int
    lean: bool = False

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """(N, H) -> (N, H)."""
        return _Attention.apply(x, self, tokens, *self.qkv.parameters, *self.out.parameters)

    def keys_and_values(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """As the call, without a gradient; and keys and values by row, (B, K, L, d)."""
        q, k, v = self._split(x, tokens, self.qkv.low(x.dtype))
        y = self._attended(q, k, v, tokens)
        return x + self.out.forward(y, self.out.low(x.dtype)), k, v

    def _split(self, x: Tensor, tokens: Tokens, low: Low | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, keys, and values, by row: (B, heads, L, d)."""
        y = self.qkv.forward(rms_norm(x, self.norm, self.eps), low)
        y = y.view(len(y), -1, self.head_size)
        turning = self.heads + self.key_heads
        turned = rotate(y[:, :turning], tokens.cos, tokens.sin)
        rows = tokens.packing.index
        q, k = by_row(turned[:, : self.heads], rows), by_row(turned[:, self.heads :], rows)
        return q, k, by_row(y[:, turning:], rows)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """(N, heads d)."""
        return by_token(attend(q, k, v), tokens.packing.owner)


@dataclass(frozen=True)
class MLPHalf:
    """Frozen parts and low-rank terms of a layer's second half, under one adapter."""

    norm: Tensor  # (H,)
    eps: float
    gate_up: Linears
    down: Linears
    lean: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """(N, H) -> (N, H)."""
        return _MLP.apply(x, self, *self.gate_up.parameters, *self.down.parameters)

    def _open(self, x: Tensor, low: Low | None) -> Tensor:
        return self.gate_up.forward(rms_norm(x, self.norm, self.eps), low)


def by_row(x: Tensor, index: Tensor) -> Tensor:
    """Packed tokens to their cells: (N, h, d) -> (B, h, L, d) contiguous."""
    rows = x[index.flatten()].view(*index.shape, *x.shape[1:])
    return rows.transpose(1, 2).contiguous()


def by_token(rows: Tensor, owner: Tensor) -> Tensor:
    """(B, h, L, d) -> (N, h d), each packed token from the cell that owns it."""
    return rows.transpose(1, 2).reshape(-1, rows.shape[1] * rows.shape[3])[owner]


def _sum_by_token(rows: Tensor, packing: Packing) -> Tensor:
    """(B, h, L, d) -> (N, h, d): a shared token's gradient is the sum over its cells, in float32 at least.

    Cells right of a row's end point at token 0 and hold 0: no query that is read sees them.
    """
    cells = rows.transpose(1, 2).flatten(0, 1)
    if len(packing) == int(packing.lengths.sum()):  # nothing is shared
        return cells[packing.owner]
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(len(packing), *cells.shape[1:], dtype=wide, device=rows.device)
    return total.index_add_(0, packing.index.flatten(), cells.to(wide)).to(rows.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, half: AttentionHalf, tokens: Tokens, *parameters: Tensor) -> Tensor:
        ctx.half, ctx.tokens = half, tokens
        ctx.low_qkv, ctx.low_out = half.qkv.low(x.dtype), half.out.low(x.dtype)
        q, k, v = half._split(x, tokens, ctx.low_qkv)
        y = half._attended(q, k, v, tokens)
        ctx.save_for_backward(*((x,) if half.lean else (x, q, k, v, y)))
        return half.out.forward(y, ctx.low_out).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        half, tokens = ctx.half, ctx.tokens
        x, *kept = ctx.saved_tensors
        q, k, v = kept[:3] if kept else half._split(x, tokens, ctx.low_qkv)
        y = kept[3] if kept else half._attended(q, k, v, tokens)
        inner, of_out = half.out.backward(grad, y, ctx.low_out)
        cells = inner.new_zeros(q.shape[0] * q.shape[2], inner.shape[1])
        cells[tokens.packing.owner] = inner
        rows = cells.view(q.shape[0], q.shape[2], half.heads, half.head_size).transpose(1, 2)
        of_q, of_k, of_v = attend_backward(rows.contiguous(), q, k, v)
        packing = tokens.packing
        of_q = by_token(of_q, packing.owner).view(len(x), half.heads, half.head_size)
        turned = torch.cat([of_q, _sum_by_token(of_k, packing)], dim=1)
        turned = rotate(turned, tokens.cos, tokens.sin, back=True)
        split = torch.cat([turned, _sum_by_token(of_v, packing)], dim=1).flatten(1)
        read = rms_norm(x, half.norm, half.eps)
        wanted = ctx.needs_input_grad[0]
        inner, of_qkv = half.qkv.backward(split, read, ctx.low_qkv, input_grad=wanted)
        of_x = rms_norm_backward(inner, x, half.norm, half.eps).add_(grad) if wanted else None
        return of_x, None, None, *of_qkv, *of_out


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, half: MLPHalf, *parameters: Tensor) -> Tensor:
        ctx.half = half
        ctx.low_both, ctx.low_down = half.gate_up.low(x.dtype), half.down.low(x.dtype)
        opened = half._open(x, ctx.low_both)
        ctx.save_for_backward(*((x,) if half.lean else (x, opened)))
        return half.down.forward(gated(opened), ctx.low_down).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        half = ctx.half
        x, *kept = ctx.saved_tensors
        opened = kept[0] if kept else half._open(x, ctx.low_both)
        inner, of_down = half.down.backward(grad, gated(opened), ctx.low_down)
        both = gated_backward(inner, opened)
        read = rms_norm(x, half.norm, half.eps)
        inner, of_both = half.gate_up.backward(both, read, ctx.low_both)
        return rms_norm_backward(inner, x, half.norm, half.eps).add_(grad), None, *of_both, *of_down
