"""Preference pairs as rows of a forest: what the two sides share is computed once."""

from __future__ import annotations

from rlhf_lightning.models.forest import Forest, Place, Segment
from rlhf_lightning.types import TokenPair


def pair_row(pair: TokenPair) -> list[Segment]:
    """A pair as one row: the common beginning once, the two endings side by side and last."""
    if not pair.prompt:
        return [Segment(pair.chosen), Segment(pair.rejected)]
    return [Segment(pair.prompt), Segment(pair.chosen, 0), Segment(pair.rejected, 0)]


def pair_size(pair: TokenPair) -> int:
    """Tokens of a pair, its common beginning counted once."""
    return len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


def pair_places(forest: Forest) -> list[Place]:
    """Where the endings of the pairs lie: all the chosen ones, then all the rejected ones."""
    return [row[-2] for row in forest.places] + [row[-1] for row in forest.places]
