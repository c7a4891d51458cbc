"""samples.jsonl: the texts as they were, in order, on one line each."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from rlhf_lightning.callbacks.samples import json_line, sample_rows
from rlhf_lightning.tracking import build_loggers, close_trackers


def read(run_dir):
    return [
        json.loads(line) for line in (run_dir / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    ]


def test_a_record_holds_the_reward_s_own_score_and_the_summed_kl(rollout):
    rows = sample_rows(rollout, iteration=7, wanted={2, 1})
    assert rows == [
        {
            "iteration": 7,
            "prompt": "drink",
            "response": "bad",
            "score": 2.0,
            "kl": 0.5,
            "length": 1,
            "ended": "eos",
        },
        {
            "iteration": 7,
            "prompt": "eat",
            "response": "fair",
            "score": 3.0,
            "kl": 1.0,
            "length": 2,
            "ended": "stop",
        },
    ]


def test_three_rollouts_of_two_samples_are_six_lines_in_order(tmp_path, make_config, make_toy, fit):
    """Entry 81."""
    fit(make_toy(make_config(3, samples=2), [0.1, 0.2, 0.3]), tmp_path)
    rows = read(tmp_path)
    assert [row["iteration"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert all(
        list(row) == ["iteration", "prompt", "response", "score", "kl", "length", "ended"] for row in rows
    )


def test_which_rows_is_counted_from_the_seed_and_changes_with_the_iteration(
    tmp_path, make_config, make_toy, fit
):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fit(make_toy(make_config(6, samples=1), [0.1] * 6), tmp_path / name)
    assert read(tmp_path / "one") == read(tmp_path / "two")
    assert len({row["response"] for row in read(tmp_path / "one")}) > 1


def test_zero_keeps_all(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(2, samples=0), [0.1, 0.2]), tmp_path)
    assert [row["response"] for row in read(tmp_path)] == ["good", "bad", "fair", "poor"] * 2


def test_two_ranks_keep_what_one_rank_keeps(rollout):
    """The wanted rows are numbers in the global batch, so a slice of it keeps its own share and no other."""
    lower = replace(rollout, rows=rollout.rows + 4)
    together = sample_rows(rollout, iteration=0, wanted={1, 6}) + sample_rows(
        lower, iteration=0, wanted={1, 6}
    )
    assert [row["response"] for row in together] == ["bad", "fair"]


@pytest.mark.parametrize(
    "text",
    [
        "料理はとても美味しかった。",
        "👩‍🍳🍜 \U0001f9d1\U0001f3fd‍🌾",
        "tab\tline\nbell\x07 escape\x1b[2J nul\x00 delete\x7f csi\x9b",
        "breaks \u2028 \u2029 \x85 \x0c \x1c end",
        "half a pair \ud83d alone",
        'quote " backslash \\ \\u2028',
        "",
    ],
)
def test_any_text_comes_back_unchanged_from_one_line(text):
    """Entry 82j."""
    line = json_line({"response": text})
    assert json.loads(line.encode("utf-8"))["response"] == text
    assert line.splitlines() == [line[:-1]]
    assert "\x1b" not in line and "\x9b" not in line


def test_scripts_stay_readable_in_the_file(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(1, samples=0), [0.1])
    toy.responses = ("美味しい", "👩‍🍳", "a\u2028b", "x\ud800y")
    fit(toy, tmp_path)
    assert tuple(row["response"] for row in read(tmp_path)) == toy.responses
    assert "美味しい" in (tmp_path / "samples.jsonl").read_text(encoding="utf-8")


def test_a_resumed_run_repeats_no_sample(tmp_path, make_config, make_toy, fit):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        folder.mkdir()
    config = make_config(4, samples=2, checkpoint_every=2)
    fit(make_toy(config, [0.4, 0.3, 0.2, 0.1]), straight)
    toy = make_toy(config, [0.4, 0.3, 0.2, 0.1])
    toy.fail = {3: RuntimeError("killed")}
    with pytest.raises(RuntimeError, match="killed"):
        fit(toy, broken)
    with (broken / "samples.jsonl").open("a") as file:
        file.write('{"iteration": 3, "pro')
    fit(make_toy(config, [0.4, 0.3, 0.2, 0.1]), broken, resume_from=2)
    assert read(broken) == read(straight)


def test_each_table_in_the_tracker_is_new_and_holds_its_iteration(
    tmp_path, monkeypatch, make_config, make_toy, fit
):
    """Entry 81: a table every 2 of 4 iterations: 0, 2 and the last are logged, each with its 2 rows."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = make_config(4, samples=2, sample_table_every=2).model_dump()
    config["logger"]["wandb"] = {"mode": "offline"}
    toy = make_toy(type(make_config(1)).model_validate(config), [0.1, 0.2, 0.3, 0.4])
    try:
        fit(toy, tmp_path, loggers=build_loggers(toy.config, tmp_path))
    finally:
        close_trackers(0)
    deadline = time.monotonic() + 60  # W&B's own process copies them, a moment after the run is closed
    while len(list(tmp_path.rglob("media/table/*.table.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("media/table/*.table.json")]
    data = sorted((table["data"] for table in tables), key=lambda rows: rows[0][0])
    assert [[row[0] for row in rows] for rows in data] == [[0, 0], [2, 2], [3, 3]]
    rows = read(tmp_path)
    assert data[-1] == [list(row.values()) for row in rows if row["iteration"] == 3]
