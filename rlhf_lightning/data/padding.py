"""From token lists of mixed length to rectangles with a mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def left_pad(ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts, each ending in the last column.

    Args:
        ids: B lists of token ids; the longest has P.
        pad_id: fills the free places; the mask, never this value, says what is real.

    Returns:
        ``prompt_ids`` (B, P) int64, and ``prompt_mask`` (B, P) bool, True on real tokens.
    """
    return _pad(ids, pad_id, left=True)


def right_pad(ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Responses, each starting in the first column.

    Args:
        ids: B lists of token ids; the longest has T.
        pad_id: fills the free places; the mask, never this value, says what is real.

    Returns:
        ``response_ids`` (B, T) int64, and ``response_mask`` (B, T) bool, True on real tokens.
    """
    return _pad(ids, pad_id, left=False)


def _pad(ids: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in ids), default=0)
    tokens = torch.full((len(ids), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(ids), width), dtype=torch.bool)
    for b, row in enumerate(ids):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[b, place] = torch.tensor(row, dtype=torch.int64)
        mask[b, place] = True
    return tokens, mask
