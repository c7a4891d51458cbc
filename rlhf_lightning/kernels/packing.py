"""Rows of tokens without padding, and what several of them begin with computed once.

A hidden state depends on the tokens up to its own and on nothing else. So of rows that begin alike (a system
prompt, the answers to one prompt) the common beginning is computed once, forward and backward: the rows are
the paths of a tree whose nodes are the packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

_VECTOR = 16


@dataclass(frozen=True)
class Packing:
    """``B`` rows of at most ``L`` tokens as ``N`` different tokens, each with its own beginning."""

    ids: Tensor  # (N,) int64
    positions: Tensor  # (N,) int64, counted along the row
    index: Tensor  # (B, L) int64: which packed token stands in a cell; 0 right of the row's end
    owner: Tensor  # (N,) int64: the first cell, of B * L, in which a packed token stands
    lengths: Tensor  # (B,) int64
    _places: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def shares(self) -> bool:
        """Whether some token stands in several rows."""
        return len(self.ids) < int(self.lengths.sum())

    def by_row(self, x: Tensor, *, first: int = 0, heads: int | None = None) -> Tensor:
        """Packed tokens to their cells, some heads of them: (N, h, d) -> (B, heads, L, d)."""
        every, size = x.shape[1:]
        key = (every, first, every if heads is None else heads)
        if key not in self._places:  # the same in all layers of a pass
            some = torch.arange(first, first + key[2], device=x.device)
            self._places[key] = self.index.unsqueeze(1) * every + some.unsqueeze(1)
        places = self._places[key]
        return x.reshape(-1, size).index_select(0, places.flatten()).view(*places.shape, size)

    def by_token(self, rows: Tensor) -> Tensor:
        """(B, h, L, d) -> (N, h, d), each packed token from the cell that owns it."""
        _, heads, length, size = rows.shape
        key = (heads, length, -1)
        if key not in self._places:
            first = self.owner // length * heads * length + self.owner % length
            steps = torch.arange(0, heads * length, length, device=rows.device)
            self._places[key] = first.unsqueeze(1) + steps
        places = self._places[key]
        return rows.reshape(-1, size).index_select(0, places.flatten()).view(*places.shape, size)

    def to(self, device: torch.device | str) -> Packing:
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self) if f.init})

    def __len__(self) -> int:
        return len(self.ids)


def pack(rows: Sequence[Sequence[int]], *, share: bool = True) -> Packing:
    """Lay rows out as the tree of their beginnings.

    Args:
        rows: token ids of each row, none empty.
        share: False computes every row by itself: the same hidden states, more tokens.
    """
    # Whole vectors: a CPU's softmax over 87 numbers takes twice as long as over 96.
    width = -(-max(map(len, rows)) // _VECTOR) * _VECTOR
    index = torch.zeros(len(rows), width, dtype=torch.int64)
    ids: list[int] = []
    positions: list[int] = []
    owner: list[int] = []
    # Sorted, a row shares its longest beginning with the row before it.
    order = sorted(range(len(rows)), key=lambda i: tuple(rows[i])) if share else range(len(rows))
    before: Sequence[int] = ()
    path: list[int] = []
    for number in order:
        row = rows[number]
        shared = common(before, row) if share else 0
        path = path[:shared] + list(range(len(ids), len(ids) + len(row) - shared))
        ids += row[shared:]
        positions += range(shared, len(row))
        owner += range(number * width + shared, number * width + len(row))
        index[number, : len(row)] = torch.tensor(path)
        before = row
    lengths = torch.tensor([len(row) for row in rows])
    return Packing(torch.tensor(ids), torch.tensor(positions), index, torch.tensor(owner), lengths)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the beginning that two rows share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
