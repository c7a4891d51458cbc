"""Cuts a rollout into optimizer steps and forward passes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf_lightning.randomness import counted_seed
from rlhf_lightning.types import Generation, Minibatch, Rollout


def minibatch_rows(count: int, size: int, *, seed: int, iteration: int, epoch: int) -> list[Tensor]:
    """A fresh order of ``count`` rows in pieces of ``size``; every row once. ``size`` divides ``count``."""
    if count % size:
        raise ValueError(f"{count} rows do not divide into minibatches of {size}")
    generator = torch.Generator().manual_seed(counted_seed(seed, "minibatches", iteration, epoch))
    return list(torch.randperm(count, generator=generator).split(size))


def micro_batches(rollout: Rollout, rows: Tensor, size: int) -> Iterator[Minibatch]:
    """The rows in pieces of at most ``size``, by length so that little is padded, each trimmed to its widths.

    Order and cut change no gradient: every loss is a sum over the denominator of the whole optimizer step.
    """
    total = rollout.prompt_mask.sum(dim=1) + rollout.lengths
    for piece in rows[total[rows].argsort()].split(size):
        yield take(rollout, piece)


def take(rollout: Rollout, rows: Tensor) -> Minibatch:
    """Rows of a rollout, without the columns that none of them uses."""
    left, right = _bounds(rollout, rows)
    return Minibatch(
        prompt_ids=rollout.prompt_ids[rows, left:],
        prompt_mask=rollout.prompt_mask[rows, left:],
        response_ids=rollout.response_ids[rows, :right],
        response_mask=rollout.response_mask[rows, :right],
        old_logprobs=rollout.logprobs[rows, :right],
        ref_logprobs=rollout.ref_logprobs[rows, :right],
        old_values=rollout.values[rows, :right],
        advantages=rollout.advantages[rows, :right],
        returns=rollout.returns[rows, :right],
    )


def slices(generation: Generation, size: int) -> Iterator[tuple[Tensor, Generation]]:
    """Pieces of at most ``size`` rows for the passes that score, by length, trimmed; their rows first."""
    total = generation.prompt_mask.sum(dim=1) + generation.lengths
    for rows in total.argsort(stable=True).split(size):
        left, right = _bounds(generation, rows)
        yield (
            rows,
            Generation(
                prompt_ids=generation.prompt_ids[rows, left:],
                prompt_mask=generation.prompt_mask[rows, left:],
                response_ids=generation.response_ids[rows, :right],
                response_mask=generation.response_mask[rows, :right],
                rows=generation.rows[rows],
                ended=tuple(generation.ended[i] for i in rows.tolist()),
            ),
        )


def _bounds(generation: Generation, rows: Tensor) -> tuple[int, int]:
    """First prompt column and one past the last response column that any of the rows uses."""
    left = generation.prompt_ids.shape[1] - int(generation.prompt_mask[rows].sum(dim=1).max())
    return left, int(generation.lengths[rows].max())
