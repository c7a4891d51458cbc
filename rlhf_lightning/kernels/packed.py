"""Frozen maps with their low-rank terms in the layout in which a CPU's library multiplies few rows fastest.

With few rows a product takes as long as its weights take to arrive, and from their plain layout oneDNN reads
them at half the speed of the memory or less (docs/performance.md). ``torch.compile`` packs frozen weights by
the same operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.kernels.linears import Low

_ROWS = 16  # for which oneDNN chooses the layout; it serves one row and hundreds as well


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine packs weights of the dtype: a CPU that multiplies bfloat16."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Packed:
    """``W x + b + B A x`` as ``[W B] [x; A x] + b`` from a packed copy.

    The term is summed with the rest before it is rounded: closer to float32 than two rounded products.

    Args:
        weight: (O, I), of a dtype and on a device that ``packs``.
        bias: (O,), or None.
        low: the adapter's terms, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, low: Low | None = None) -> None:
        self.bias = bias
        self.A = None if low is None else _pack(low.A)
        self.weight = _pack(weight if low is None else torch.cat([weight, low.B], dim=1))

    def __call__(self, x: Tensor) -> Tensor:
        """(N, I) -> (N, O), without a gradient."""
        if self.A is not None:
            x = torch.cat([x, _product(x, self.A, None)], dim=1)
        return _product(x, self.weight, self.bias)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
