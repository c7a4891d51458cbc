"""Random tensors in float64, where a derivative can be told from its approximation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def random():
    """``random(3, 4, grad=True) -> Tensor`` in float64; the same numbers in every run."""
    generator = torch.Generator().manual_seed(11)

    def make(*shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)

    return make
