"""Root-mean-square norm, rotary positions and the gated unit, each with its derivative."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``w x / sqrt(mean x^2 + eps)`` over the last axis (Zhang and Sennrich 2019); sums run in float32."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gradient of ``x``.

    d/dx = r (w g) - x r^3 mean(x w g),   r = (mean x^2 + eps)^(-1/2)
    """
    wide = x.float() if x.dtype != torch.float64 else x
    scaled = grad.to(wide.dtype).mul_(weight) if grad.dtype != wide.dtype else grad * weight
    r = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    along = (scaled * wide).mean(dim=-1, keepdim=True).mul_(r.pow(3)).neg_()
    return scaled.mul_(r).addcmul_(wide, along).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotary positions (Su et al. 2021) on pairs (i, i + d/2); ``back`` turns the other way: the derivative.

    Args:
        x: (..., d).
        cos, sin: broadcast against (..., d/2).
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    left, right = turned.chunk(2, dim=-1)
    sign = -1.0 if back else 1.0
    torch.mul(first, cos, out=left)
    left.addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=right)
    right.addcmul_(first, sin, value=sign)
    return turned


def gated(gate_up: Tensor, passed: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020): (N, 2 I) -> (N, I).

    Args:
        passed: ``silu(gate)`` where it is there already; left as it is.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up) if passed is None else passed * up


def gated_backward(grad: Tensor, gate_up: Tensor, passed: Tensor) -> Tensor:
    """Gradient of both halves, (N, I) -> (N, 2 I); ``passed`` is ``silu(gate)``."""
    gate, up = gate_up.chunk(2, dim=-1)
    both = torch.empty_like(gate_up)
    of_gate, of_up = both.chunk(2, dim=-1)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
    torch.mul(passed, grad, out=of_up)
    return both
