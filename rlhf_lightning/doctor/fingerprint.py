"""Whether a tensor's bytes are still the same, without a second copy of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_CHUNK = 1 << 25  # bytes looked at together


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A 64-bit sum over each tensor's bytes, computed where the tensor lies.

    The 8-byte words w_i are added as (2 i + 1) w_i modulo 2^64: odd factors, so that no change of a single
    word can cancel, and different ones, so that a swap shows.
    """
    return {name: _sum(tensor) for name, tensor in tensors.items()}


def _sum(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = len(flat)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).clone().view(torch.int64)
        factors = torch.arange(start // 8, start // 8 + len(words), device=words.device) * 2 + 1
        total += int((words * factors).sum())
    return total % 2**64
