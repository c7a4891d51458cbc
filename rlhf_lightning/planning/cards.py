"""Which cards a plan fits."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
CARDS = (8, 12, 16, 24, 48, 80)
"""Sizes of cards, GiB."""
HEADROOM = 0.15
"""Share of a card that a plan has to leave free: the plan's own error, and what allocators lose in gaps."""


@dataclass(frozen=True)
class Verdict:
    """How a plan and a card go together: ``fits``, ``tight`` (inside the headroom), or ``no``."""

    gib: int
    word: str


def judge_cards(peak: int) -> tuple[Verdict, ...]:
    """A verdict for each size of card, ``peak`` in bytes."""
    return tuple(Verdict(gib, _word(peak, gib * GIB)) for gib in CARDS)


def _word(peak: int, size: int) -> str:
    if peak <= (1 - HEADROOM) * size:
        return "fits"
    return "tight" if peak <= size else "no"
