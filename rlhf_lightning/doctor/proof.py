"""What a check is and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rlhf_lightning.doctor.exam import Exam


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    passed: bool
    figure: str


@dataclass(frozen=True)
class Proof:
    """One check: its name, what a failure means and what usually causes it, and how it is done."""

    name: str
    meaning: str
    run: Callable[[Exam], Finding]


def distance(one: Tensor, two: Tensor) -> float:
    """max |one - two| as a share of the largest number in ``two`` or of 1; infinite where one is NaN."""
    if one.numel() == 0:
        return 0.0
    one, two = one.detach().float().cpu(), two.detach().float().cpu()
    figure = float((one - two).abs().max() / two.abs().max().clamp(min=1.0))
    return figure if figure == figure else float("inf")
