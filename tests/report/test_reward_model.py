"""The picture of a reward model, from its file alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from rlhf_lightning.report.reward_model import by_length, draw

PAIRS = {
    "chosen": [1.0, 2.0, 0.0, 1.0],
    "rejected": [0.0, 3.0, 0.0, -1.0],
    "chosen_length": [4.0, 5.0, 6.0, 2.0],
    "rejected_length": [3.0, 4.0, 6.0, 9.0],
}


def test_pairs_by_which_side_is_longer():
    found = by_length({name: torch.tensor(values) for name, values in PAIRS.items()})
    assert found == {
        "chosen shorter": (1.0, 2.0, 1),
        "equal length": (0.5, 0.0, 1),  # equal scores count half
        "chosen longer": (0.5, 0.0, 2),  # leads of 1 and -1
    }


def test_a_group_without_pairs_is_left_out():
    found = by_length({name: torch.tensor(values[:2]) for name, values in PAIRS.items()})
    assert list(found) == ["chosen longer"]


@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e4])  # all scores equal; so far apart that p is 0 or 1
def test_it_draws_whatever_was_measured(tmp_path: Path, count: int, scale: float):
    data, picture = tmp_path / "held_out.json", tmp_path / "held_out.png"
    rows = {name: values[:count] for name, values in PAIRS.items()}
    data.write_text(
        json.dumps(rows | {side: [scale * x for x in rows[side]] for side in ("chosen", "rejected")})
    )
    draw(data, picture)
    image = imread(picture)
    assert image.shape == (880, 1100, 4)
    assert all(
        part.std() > 0.05 for half in (image[:440], image[440:]) for part in (half[:, :550], half[:, 550:])
    )
