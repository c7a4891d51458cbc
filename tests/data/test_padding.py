"""Padding by hand."""

from __future__ import annotations

import torch

from rlhf_lightning.data.padding import left_pad, right_pad


def test_left() -> None:
    ids, mask = left_pad([[5], [6, 7, 8], []], pad_id=9)
    assert ids.tolist() == [[9, 9, 5], [6, 7, 8], [9, 9, 9]]
    assert mask.tolist() == [[False, False, True], [True, True, True], [False, False, False]]
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_right() -> None:
    ids, mask = right_pad([[5], [6, 7, 8]], pad_id=9)
    assert ids.tolist() == [[5, 9, 9], [6, 7, 8]]
    assert mask.tolist() == [[True, False, False], [True, True, True]]


def test_a_real_token_that_equals_the_pad_token_is_real() -> None:
    for pad in (left_pad, right_pad):
        _, mask = pad([[9, 9]], pad_id=9)
        assert mask.all()


def test_nothing() -> None:
    ids, mask = left_pad([], pad_id=0)
    assert ids.shape == mask.shape == (0, 0)
