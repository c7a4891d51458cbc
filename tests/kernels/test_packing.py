"""Rows as the tree of their beginnings: nothing lost, nothing twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.kernels.packing import common, pack

# Three tokens make beginnings meet often.
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=7)


def test_two_answers_to_one_prompt_by_hand():
    packing = pack([[7, 8, 9], [7, 8, 5, 6]])
    # sorted, the second row comes first
    assert packing.ids.tolist() == [7, 8, 5, 6, 9] and packing.positions.tolist() == [0, 1, 2, 3, 2]
    assert packing.index[0, :3].tolist() == [0, 1, 4] and packing.index[1, :4].tolist() == [0, 1, 2, 3]
    width = packing.index.shape[1]
    assert packing.owner.tolist() == [width, width + 1, width + 2, width + 3, 2]
    assert packing.lengths.tolist() == [3, 4] and len(packing) == 5


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, share=st.booleans())
def test_rows_can_be_read_back(rows, share):
    packing = pack(rows, share=share)
    width = packing.index.shape[1]
    assert packing.lengths.tolist() == [len(row) for row in rows] and width >= max(map(len, rows))
    for row, index in zip(rows, packing.index, strict=True):
        assert packing.ids[index[: len(row)]].tolist() == row
        assert packing.positions[index[: len(row)]].tolist() == list(range(len(row)))
        assert not index[len(row) :].any()
    # each packed token stands in the cell that owns it, and no two own one cell
    assert torch.equal(packing.index.flatten()[packing.owner], torch.arange(len(packing)))
    assert all(int(cell) % width < len(rows[int(cell) // width]) for cell in packing.owner)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_as_many_tokens_as_different_beginnings(rows):
    beginnings = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    assert len(pack(rows)) == len(beginnings)
    assert len(pack(rows, share=False)) == sum(map(len, rows))


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_the_order_of_the_rows_changes_no_row(rows, seed):
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    one, two = pack(rows), pack([rows[i] for i in order])
    assert torch.equal(one.index[order], two.index) or len(set(map(tuple, rows))) < len(rows)
    assert sorted(one.ids.tolist()) == sorted(two.ids.tolist())


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([2], [1], 0)],
)
def test_common(a, b, length):
    assert common(a, b) == common(b, a) == length


def test_tuples_pack_as_lists_do():
    assert pack([(1, 2), (1, 3)]).ids.tolist() == pack([[1, 2], [1, 3]]).ids.tolist() == [1, 2, 3]
