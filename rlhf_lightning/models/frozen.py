"""Frozen weights of maps that read one input, as one matrix in the dtype of the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn


class Frozen:
    """W of several maps below one another, (O, I).

    Unquantised maps are moved into one tensor of which each becomes a view. 4-bit ones are de-quantised at
    every call, by the function that their own forward uses, unless a copy is kept.
    """

    def __init__(self, maps: Sequence[Any], dtype: torch.dtype) -> None:
        self.maps, self.dtype = list(maps), dtype
        self.sizes = tuple(int(m.out_features) for m in self.maps)
        self.quantised = any(map(_quantised, self.maps))
        self._kept: Tensor | None = None
        if not self.quantised:
            self._kept = self.maps[0].weight.detach() if len(self.maps) == 1 else self._join()

    def __call__(self) -> Tensor:
        return self._dequantised() if self._kept is None else self._kept

    def keep(self, kept: bool) -> None:
        """Hold a de-quantised copy from now on, or drop it."""
        if self.quantised:
            self._kept = self._dequantised() if kept else None

    def biases(self) -> Tensor | None:
        """(O,), zeros where one of the maps has none; None where all have none."""
        if all(m.bias is None for m in self.maps):
            return None
        parts = [
            m.weight.new_zeros(s) if m.bias is None else m.bias
            for m, s in zip(self.maps, self.sizes, strict=True)
        ]
        return torch.cat([part.detach().to(self.dtype) for part in parts])

    def _join(self) -> Tensor:
        joined = torch.cat([m.weight.detach() for m in self.maps])
        for m, rows in zip(self.maps, joined.split(self.sizes), strict=True):
            m.weight.data = rows
        return joined

    def _dequantised(self) -> Tensor:
        parts = [
            (dequantize_4bit(m.weight.data, m.weight.quant_state) if _quantised(m) else m.weight.detach())
            for m in self.maps
        ]
        parts = [part.to(self.dtype) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def readable(linear: nn.Module) -> bool:
    """Whether the layer is one whose weight this file reads: a plain one, or in bitsandbytes' four bits."""
    if type(linear) is Linear4bit:
        return True
    return type(linear) is nn.Linear and type(linear.weight.data) is Tensor


def _quantised(linear: Any) -> bool:
    """Some of a checkpoint's maps may have been left as they are."""
    return hasattr(linear.weight, "quant_state")
