"""The same prompts before the first update and after the last."""

from __future__ import annotations

import json

import pytest


def read(run_dir):
    return json.loads((run_dir / "before_after.json").read_text())


def test_answers_before_any_update_and_after_all(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(3, show=10), [0.1, 0.2, 0.3])
    fit(toy, tmp_path)
    rows = read(tmp_path)
    assert sorted(row["prompt"] for row in rows) == ["drink", "eat", "pay"]  # "eat" stands twice in the batch
    final = float(toy.weight.detach()[0])
    assert final != 0
    for row in rows:
        assert (row["before"], row["before_score"]) == (f"{row['prompt']} 0.000", 0.0)
        assert (row["after"], row["after_score"]) == (f"{row['prompt']} {final:.3f}", final)


def test_a_rerun_shows_the_same_prompts(tmp_path, make_config, make_toy, fit):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fit(make_toy(make_config(1, show=2), [0.1]), tmp_path / name)
    assert read(tmp_path / "one") == read(tmp_path / "two")
    assert len(read(tmp_path / "one")) == 2


def test_a_broken_run_has_its_before_and_a_resumed_one_keeps_it(tmp_path, make_config, make_toy, fit):
    config = make_config(4, show=2, checkpoint_every=2)
    toy = make_toy(config, [0.1] * 4)
    toy.fail = {2: RuntimeError("killed")}
    with pytest.raises(RuntimeError, match="killed"):
        fit(toy, tmp_path)
    broken = read(tmp_path)
    assert [row["after"] for row in broken] == [None, None]
    (tmp_path / "before_after.json").unlink()  # the checkpoint is enough
    fit(make_toy(config, [0.1] * 4), tmp_path, resume_from=2)
    resumed = read(tmp_path)
    assert [(row["prompt"], row["before"]) for row in resumed] == [
        (row["prompt"], row["before"]) for row in broken
    ]
    assert all(row["after_score"] != 0 for row in resumed)


def test_show_zero_shows_none(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(1, show=0), [0.1]), tmp_path)
    assert not (tmp_path / "before_after.json").exists()
