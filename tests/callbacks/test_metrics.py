"""metrics.csv and timings.csv: one row an iteration, none missing or doubled, whatever happens between."""

from __future__ import annotations

import csv

import pytest
from lightning.pytorch.loggers import CSVLogger

COLUMNS = [
    "iteration", "optimizer_steps", "responses", "tokens",
    "objective/kl", "objective/score", "rollout/length_mean", "rollout/tokens",
]  # fmt: skip
MEASURED = ["iteration", "memory/peak_gb", "throughput/tokens_per_s"]


def read(run_dir, name="metrics"):
    with (run_dir / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_three_iterations_make_three_rows_with_every_column(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(3), [0.125, 0.1, 0.3]), tmp_path)
    rows = read(tmp_path)
    assert list(rows[0]) == COLUMNS
    assert [row["iteration"] for row in rows] == ["0", "1", "2"]
    assert [row["optimizer_steps"] for row in rows] == ["2", "4", "6"]
    assert [row["responses"] for row in rows] == ["4", "8", "12"]
    assert [row["tokens"] for row in rows] == ["9", "18", "27"]
    assert [float(row["objective/score"]) for row in rows] == [0.125, 0.1, 0.3]
    costs = read(tmp_path, "timings")
    assert list(costs[0]) == MEASURED and [row["iteration"] for row in costs] == ["0", "1", "2"]
    assert all(float(row[name]) > 0 for row in costs for name in MEASURED[1:])


def test_a_late_name_widens_the_file_and_a_missing_one_leaves_a_gap(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(3), [0.1, 0.2, 0.3])
    toy.extra = {1: {"reward/late": 7.0}}
    fit(toy, tmp_path)
    rows = read(tmp_path)
    assert [row["reward/late"] for row in rows] == ["", "7.0", ""]
    assert list(rows[0]) == [*COLUMNS[:-2], "reward/late", *COLUMNS[-2:]]
    assert [row["objective/score"] for row in rows] == ["0.1", "0.2", "0.3"]


def test_a_resumed_run_repeats_no_row_and_misses_none(tmp_path, make_config, make_toy, fit):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        folder.mkdir()
    scores = [0.1, 0.4, 0.2, 0.3, 0.5]
    fit(make_toy(make_config(5, checkpoint_every=2), scores), straight)
    # Killed in iteration 3: the checkpoint is that after two, a third row is whole and a fourth is torn.
    toy = make_toy(make_config(5, checkpoint_every=2), [0.1, 0.4, 0.15, 0.3, 0.5])
    toy.fail = {3: RuntimeError("killed")}
    with pytest.raises(RuntimeError, match="killed"):
        fit(toy, broken)
    with (broken / "metrics.csv").open("a") as file:
        file.write("3,8,16,36,0.2")
    assert len((broken / "metrics.csv").read_text().split("\n")) == 5
    fit(make_toy(make_config(5, checkpoint_every=2), scores), broken, resume_from=2)
    assert (broken / "metrics.csv").read_bytes() == (straight / "metrics.csv").read_bytes()
    assert len(read(broken)) == 5
    assert [row["iteration"] for row in read(broken, "timings")] == ["0", "1", "2", "3", "4"]


def test_a_new_run_in_a_used_folder_starts_its_file_anew(tmp_path, make_config, make_toy, fit):
    for _ in range(2):
        fit(make_toy(make_config(2), [0.1, 0.2]), tmp_path)
    assert [row["iteration"] for row in read(tmp_path)] == ["0", "1"]


def test_a_resume_that_does_not_join_is_an_error(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(2), [0.1, 0.2]), tmp_path)
    with pytest.raises(RuntimeError, match="iteration 2 came where 1 was due"):
        fit(make_toy(make_config(4), [0.1] * 4), tmp_path, resume_from=1)


def test_rows_are_on_disk_before_the_next_iteration(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(3), [0.1, 0.2, 0.3])
    seen = []
    step = toy.training_step

    def counting_step(*arguments):
        seen.append(len(read(tmp_path)) if (tmp_path / "metrics.csv").exists() else 0)
        step(*arguments)

    toy.training_step = counting_step
    fit(toy, tmp_path)
    assert seen == [0, 1, 2]


def test_loggers_get_the_same_row_on_the_iteration_axis(tmp_path, make_config, make_toy, fit):
    """Entry 70: one axis, rising by one, though each iteration makes two optimizer steps."""
    logger = CSVLogger(tmp_path, name="csv", version="")
    fit(make_toy(make_config(3), [0.1, 0.2, 0.3]), tmp_path, loggers=[logger])
    logger.save()
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        logged = list(csv.DictReader(file))
    assert [row["step"] for row in logged] == ["0", "1", "2"]
    own = [one | other for one, other in zip(read(tmp_path), read(tmp_path, "timings"), strict=True)]
    assert [{name: row[name] for name in own[0]} for row in logged] == own
