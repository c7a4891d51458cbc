"""summary.json: how the run ended, whichever way it did."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from rlhf_lightning.callbacks import write_failure
from rlhf_lightning.errors import UserError


def read(run_dir):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads((run_dir / "summary.json").read_text(), parse_constant=refuse)


def test_a_finished_run(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(3), [0.1, 0.5, 0.3], seconds=0.05), tmp_path)
    summary = read(tmp_path)
    assert (summary["status"], summary["error"]) == ("finished", None)
    assert (summary["iterations"], summary["total_iterations"]) == (3, 3)
    assert summary["counters"] == {"optimizer_steps": 6, "responses": 12, "tokens": 27}
    assert summary["last"]["objective/score"] == 0.3
    assert (summary["best"]["objective/score"], summary["best"]["iteration"]) == (0.5, 1)
    assert summary["wall_s"] > 0.15
    assert 0 < summary["tokens_per_s"] <= 27 / 0.15
    assert summary["peak_memory_gb"] == pytest.approx(summary["last"]["memory/peak_gb"], rel=0.2)
    assert summary["versions"]["python"] == sys.version.split()[0]
    assert all(
        summary["versions"][name] for name in ("torch", "lightning", "transformers", "peft", "rlhf_lightning")
    )


def test_a_failed_run_keeps_its_figures_and_says_why(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(3), [0.1, 0.5, 0.3])
    toy.fail = {2: UserError("reward.function: row 3 is NaN")}
    with pytest.raises(UserError):
        fit(toy, tmp_path)
    summary = read(tmp_path)
    assert (summary["status"], summary["error"]) == ("failed", "reward.function: row 3 is NaN")
    assert (summary["iterations"], summary["last"]["objective/score"]) == (2, 0.5)


def test_an_unexpected_error_is_named(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(1), [0.1])
    toy.fail = {0: ZeroDivisionError("by zero")}
    with pytest.raises(ZeroDivisionError):
        fit(toy, tmp_path)
    summary = read(tmp_path)
    assert (summary["status"], summary["error"]) == ("failed", "ZeroDivisionError: by zero")
    assert (summary["iterations"], summary["last"], summary["best"]) == (0, {}, {})


def test_an_interrupted_run(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(3), [0.1, 0.5, 0.3])
    toy.fail = {1: KeyboardInterrupt()}
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit(toy, tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    summary = read(tmp_path)
    assert (summary["status"], summary["error"]) == ("interrupted", "KeyboardInterrupt")


def test_no_nan_in_the_file(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(2), [0.1, float("nan")]), tmp_path)
    summary = read(tmp_path)
    assert summary["last"]["objective/score"] is None
    assert summary["best"]["objective/score"] == 0.1


def test_a_resumed_run_counts_the_whole(tmp_path, make_config, make_toy, fit):
    config, scores = make_config(4, checkpoint_every=2), [0.1, 0.9, 0.2, 0.3]
    toy = make_toy(config, scores, seconds=0.1)
    toy.fail = {2: RuntimeError("killed")}
    with pytest.raises(RuntimeError, match="killed"):
        fit(toy, tmp_path)
    assert read(tmp_path)["status"] == "failed"
    fit(make_toy(config, scores, seconds=0.1), tmp_path, resume_from=2)
    summary = read(tmp_path)
    assert (summary["status"], summary["error"], summary["iterations"]) == ("finished", None, 4)
    assert summary["best"]["iteration"] == 1
    assert summary["counters"]["tokens"] == 36
    assert summary["wall_s"] > 0.4


def test_while_it_runs_no_old_ending_is_shown(tmp_path, make_config, make_toy, fit):
    (tmp_path / "summary.json").write_text('{"status": "failed"}')
    toy = make_toy(make_config(1), [0.1])
    seen = []
    step = toy.training_step
    toy.training_step = lambda *arguments: (
        seen.append((tmp_path / "summary.json").exists()),
        step(*arguments),
    )[1]
    fit(toy, tmp_path)
    assert seen == [False]


def test_a_failure_before_the_fit(tmp_path):
    write_failure(tmp_path, UserError("model.path=/nowhere does not exist"))
    summary = read(tmp_path)
    assert (summary["status"], summary["error"]) == ("failed", "model.path=/nowhere does not exist")
    assert summary["versions"]["torch"]


def test_a_failure_after_the_fit_keeps_the_figures(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(1), [0.25]), tmp_path)
    write_failure(tmp_path, OSError("no space for the report"))
    summary = read(tmp_path)
    assert (summary["status"], summary["error"]) == ("failed", "OSError: no space for the report")
    assert summary["last"]["objective/score"] == 0.25
