"""The two halves of a decoder layer as differentiable functions of packed tokens.

    x <- x + W_o attention(rotate(W_qkv norm(x)))
    x <- x + W_down (silu(W_gate norm(x)) * W_up norm(x))

Gradients go to the input and to the adapter's low-rank terms; everything else is frozen. Kept for the
backward: the input, and (unless ``lean``) queries, keys, values, the attention's output and short rows'
probabilities, or gate and up; and the low-rank terms made ready.
Norms and products of gate and up are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from rlhf_lightning.kernels.attention import attend, attend_and_keep, attend_backward
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
        q, k, v, _ = self._split(x, tokens, self.qkv.low(x.dtype))
        y = tokens.packing.by_token(attend(q, k, v)).flatten(1)
        return x + self.out.forward(y, self.out.low(x.dtype)), k, v

    def _split(
        self, x: Tensor, tokens: Tokens, low: Low | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotated queries, keys, and values, by row: (B, heads, L, d); and what ``Linears.opened`` gives."""
        y, opened = self.qkv.opened(rms_norm(x, self.norm, self.eps), low)
        y = y.view(len(y), -1, self.head_size)
        turning = self.heads + self.key_heads
        turned = rotate(y[:, :turning], tokens.cos, tokens.sin)
        by_row = tokens.packing.by_row
        q, k = by_row(turned, heads=self.heads), by_row(turned, first=self.heads, heads=self.key_heads)
        return q, k, by_row(y, first=turning, heads=self.key_heads), opened

    def _keeps(self, width: int, length: int) -> bool:
        """Probabilities are kept while they are small beside the rest that a token leaves."""
        return self.heads * length <= 2 * width


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

    def _open(self, x: Tensor, low: Low | None) -> tuple[Tensor, Tensor | None]:
        return self.gate_up.opened(rms_norm(x, self.norm, self.eps), low)


def _sum_by_token(rows: Tensor, packing: Packing) -> Tensor:
    """(B, h, L, d) -> (N, h, d): a shared token's gradient is the sum over its cells, in float32 at least.

    Cells right of a row's end point at token 0 and hold 0: no query that is read sees them.
    """
    cells = rows.transpose(1, 2).flatten(0, 1)
    if not packing.shares:
        return cells[packing.owner]
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(len(packing), *cells.shape[1:], dtype=wide, device=rows.device)
    return total.index_add_(0, packing.index.flatten(), cells.to(wide)).to(rows.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, half: AttentionHalf, tokens: Tokens, *parameters: Tensor) -> Tensor:
        low_qkv, low_out = half.qkv.low(x.dtype), half.out.low(x.dtype)
        q, k, v, of_qkv = half._split(x, tokens, low_qkv)
        read, p = attend_and_keep(q, k, v)
        y = tokens.packing.by_token(read).flatten(1)
        result, of_out = half.out.opened(y, low_out)
        ctx.half, ctx.tokens = half, tokens
        if half.lean:
            q = k = v = y = p = of_qkv = of_out = None  # type: ignore[assignment]
        elif not half._keeps(x.shape[1], q.shape[2]):
            p = None
        ctx.save_for_backward(x, *_pair(low_qkv), *_pair(low_out), q, k, v, y, p, of_qkv, of_out)
        return result.add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        half, tokens = ctx.half, ctx.tokens
        x, a_qkv, b_qkv, a_out, b_out, q, k, v, y, p, of_qkv, of_out = ctx.saved_tensors
        low_qkv, low_out = _low(a_qkv, b_qkv), _low(a_out, b_out)
        packing = tokens.packing
        if q is None:
            q, k, v, of_qkv = half._split(x, tokens, low_qkv)
            y = packing.by_token(attend(q, k, v)).flatten(1)
        inner, out_grads = half.out.backward(grad, y, low_out, opened=of_out)
        cells = inner.new_zeros(q.shape[0] * q.shape[2], inner.shape[1])
        cells[packing.owner] = inner
        rows = cells.view(q.shape[0], q.shape[2], half.heads, half.head_size).transpose(1, 2)
        of_q, of_k, of_v = attend_backward(rows.contiguous(), q, k, v, p)
        turned = torch.cat([packing.by_token(of_q), _sum_by_token(of_k, packing)], dim=1)
        turned = rotate(turned, tokens.cos, tokens.sin, back=True)
        split = torch.cat([turned, _sum_by_token(of_v, packing)], dim=1).flatten(1)
        read = rms_norm(x, half.norm, half.eps)
        wanted = ctx.needs_input_grad[0]
        inner, qkv_grads = half.qkv.backward(split, read, low_qkv, opened=of_qkv, input_grad=wanted)
        of_x = rms_norm_backward(inner, x, half.norm, half.eps).add_(grad) if wanted else None
        return of_x, None, None, *qkv_grads, *out_grads


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, half: MLPHalf, *parameters: Tensor) -> Tensor:
        low_both, low_down = half.gate_up.low(x.dtype), half.down.low(x.dtype)
        both, of_both = half._open(x, low_both)
        result, of_down = half.down.opened(gated(both), low_down)
        ctx.half = half
        if half.lean:
            both = of_both = of_down = None  # type: ignore[assignment]
        ctx.save_for_backward(x, *_pair(low_both), *_pair(low_down), both, of_both, of_down)
        return result.add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        half = ctx.half
        x, a_both, b_both, a_down, b_down, both, of_both, of_down = ctx.saved_tensors
        low_both, low_down = _low(a_both, b_both), _low(a_down, b_down)
        if both is None:
            both, of_both = half._open(x, low_both)
        passed = silu(both.chunk(2, dim=-1)[0])
        inner, down_grads = half.down.backward(grad, gated(both, passed), low_down, opened=of_down)
        both = gated_backward(inner, both, passed)
        read = rms_norm(x, half.norm, half.eps)
        wanted = ctx.needs_input_grad[0]
        inner, both_grads = half.gate_up.backward(both, read, low_both, opened=of_both, input_grad=wanted)
        of_x = rms_norm_backward(inner, x, half.norm, half.eps).add_(grad) if wanted else None
        return of_x, None, *both_grads, *down_grads


def _pair(low: Low | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if low is None else (low.A, low.B)


def _low(a: Tensor | None, b: Tensor | None) -> Low | None:
    return None if a is None or b is None else Low(a, b)
