"""Several texts in one row, none of which sees another, and what two of them share computed once.

A row is a small forest: each segment continues its parent, or begins a text of its own. A preference pair is
a trunk (the prompt) with two branches; packed demonstrations are trees without branches. A token attends to
the tokens before it in its own segment and in those that this one continues, and its position counts along
that path, so that every hidden state is that of the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """A run of tokens that continues the segment numbered ``parent`` of its row, or begins a text."""

    ids: Sequence[int]
    parent: int | None = None


class Place(NamedTuple):
    """Where a segment lies: columns ``start .. end - 1`` of ``row``, predicted from ``before`` and on."""

    row: int
    start: int
    end: int
    before: int | None
    """Column of the last token of the segment that it continues; None where it begins a text."""


@dataclass(frozen=True)
class Forest:
    """Rows of segments as one batch."""

    ids: Tensor  # (B, L) int64, right-padded
    positions: Tensor  # (B, L) int64, along each segment's own text
    mask: Tensor  # (B, 1, L, L) bool, True where the token of axis 2 sees that of axis 3; or (B, L) bool
    places: list[list[Place]]  # of each row as it was given, its segments in order

    @property
    def tokens(self) -> int:
        """Tokens computed, padding left out."""
        if self.mask.ndim == 2:
            return int(self.mask.sum())
        return sum(place.end - place.start for row in self.places for place in row)


def plant(rows: Sequence[Sequence[Segment]], *, pad_id: int, together: bool = True) -> Forest:
    """Lay segments out as rows with their mask.

    Args:
        rows: the segments of each row; a parent comes before what continues it.
        pad_id: fills the free cells, which see themselves alone and are seen by none.
        together: False gives every text a row of its own under an ordinary mask, for attention kernels that
            take no other: the same hidden states at the price of computing shared beginnings again.
    """
    if not together:
        return _apart(rows, pad_id)
    width = max(sum(len(segment.ids) for segment in row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    positions = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    places: list[list[Place]] = []
    for number, row in enumerate(rows):
        places.append([])
        column = 0
        for segment in row:
            start, end = column, column + len(segment.ids)
            before = None if segment.parent is None else places[number][segment.parent].end - 1
            ids[number, start:end] = torch.tensor(segment.ids, dtype=torch.int64)
            first = 0 if before is None else int(positions[number, before]) + 1
            positions[number, start:end] = torch.arange(first, first + end - start)
            mask[number, start:end, start:end] = causal[: end - start, : end - start]
            if before is not None:  # what the parent's last token sees, its children see
                mask[number, start:end] |= mask[number, before]
            places[number].append(Place(number, start, end, before))
            column = end
        if column < width:
            mask[number, column:] = torch.eye(width, dtype=torch.bool)[column:]
    return Forest(ids, positions, mask.unsqueeze(1), places)


def _apart(rows: Sequence[Sequence[Segment]], pad_id: int) -> Forest:
    paths: list[list[int]] = []
    places: list[list[Place]] = []
    for row in rows:
        inner = {segment.parent for segment in row}
        found: dict[int, Place] = {}
        for number, _ in enumerate(row):
            if number in inner:
                continue
            chain: list[int] = []
            here: int | None = number
            while here is not None:
                chain.insert(0, here)
                here = row[here].parent
            path: list[int] = []
            for link in chain:
                start = len(path)
                path += row[link].ids
                found.setdefault(link, Place(len(paths), start, len(path), start - 1 if start else None))
            paths.append(path)
        places.append([found[number] for number in range(len(row))])
    width = max(map(len, paths))
    ids = torch.full((len(paths), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(paths), width), dtype=torch.bool)
    for number, path in enumerate(paths):
        ids[number, : len(path)] = torch.tensor(path, dtype=torch.int64)
        mask[number, : len(path)] = True
    positions = (mask.long().cumsum(dim=1) - 1).clamp_min(0)
    return Forest(ids, positions, mask, places)


def predictors(places: Sequence[Place]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cells from which the tokens of some segments are predicted, one segment a line.

    A segment that begins a text has no cell before its first token, which is therefore left out.

    Returns:
        rows (N, 1), the predicting columns (N, T), the predicted tokens' columns (N, T), each int64, padded
        with a valid cell; and the mask (N, T) bool, True on real ones.
    """
    begins = [place.start if place.before is None else place.before for place in places]
    firsts = [place.start + (place.before is None) for place in places]
    lengths = [place.end - first for place, first in zip(places, firsts, strict=True)]
    steps = torch.arange(max(lengths))
    mask = steps < torch.tensor(lengths).unsqueeze(1)
    targets = torch.where(mask, torch.tensor(firsts).unsqueeze(1) + steps, 0)
    sources = torch.where(steps == 0, torch.tensor(begins).unsqueeze(1), targets - 1).clamp_min(0)
    return torch.tensor([place.row for place in places]).unsqueeze(1), sources, targets, mask
