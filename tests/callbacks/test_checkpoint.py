"""Checkpoints: there when the fit ends, whole at every moment, plain inside, and continued exactly."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf_lightning.errors import UserError


def load(run_dir, name):
    return torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)


def iterations(run_dir, name):
    return load(run_dir, name)["counters"]["iteration"]


def test_two_rollouts_leave_a_checkpoint(tmp_path, make_config, make_toy, fit):
    """Entry 57: also where the run is shorter than the interval between checkpoints."""
    trainer = fit(make_toy(make_config(2, checkpoint_every=10), [0.1, 0.2]), tmp_path)
    assert trainer.global_step == 4
    assert iterations(tmp_path, "last") == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


def test_an_optimizer_that_is_not_counted_is_an_error_at_the_end(tmp_path, make_config, make_toy, fit):
    """Entry 57: stepping the raw optimizer leaves global_step at 0, and Lightning may save nothing."""
    toy = make_toy(make_config(2), [0.1, 0.2])
    toy.raw_optimizer = True
    with pytest.raises(RuntimeError, match=r"without a checkpoint .* 0 steps were counted"):
        fit(toy, tmp_path)


def test_a_checkpoint_that_vanished_is_an_error_at_the_end(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(1), [0.1])
    toy.on_train_end = lambda: None
    toy.save_adapters = lambda folder: (tmp_path / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(RuntimeError, match="ended without a checkpoint"):
        fit(toy, tmp_path)


def test_last_is_the_last_and_best_the_first_highest(tmp_path, make_config, make_toy, fit):
    fit(make_toy(make_config(5, checkpoint_every=2), [0.1, 0.5, 0.3, 0.5, float("nan")]), tmp_path)
    assert iterations(tmp_path, "last") == 5
    assert (
        iterations(tmp_path, "best") == 2
    )  # 0.5 came in the second iteration; a tie and a NaN change nothing


def test_a_best_saved_with_the_last_is_not_changed_by_the_next_last(tmp_path, make_config, make_toy, fit):
    """Iteration 2 is due and best at once: one file with two names, of which only one is replaced later."""
    fit(make_toy(make_config(4, checkpoint_every=2), [0.1, 0.9, 0.3, 0.4]), tmp_path)
    assert (iterations(tmp_path, "best"), iterations(tmp_path, "last")) == (2, 4)


def test_the_interval_holds(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(6, checkpoint_every=2), [0.9, 0.1, 0.1, 0.1, 0.1, 0.1])
    toy.fail = {5: RuntimeError("killed")}
    with pytest.raises(RuntimeError, match="killed"):
        fit(toy, tmp_path)
    assert (iterations(tmp_path, "best"), iterations(tmp_path, "last")) == (1, 4)
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["after_4"]


def test_what_is_inside_is_plain(tmp_path, make_config, make_toy, fit):
    """Entries 66 and 67: the safe loader takes it, and the hyperparameters are the config alone."""
    toy = make_toy(make_config(2), [0.1, 0.2])
    fit(toy, tmp_path)
    checkpoint = load(tmp_path, "last")
    assert json.loads(json.dumps(checkpoint["hyper_parameters"])) == toy.config.model_dump(mode="json")
    assert list(checkpoint["state_dict"]) == ["weight"]
    assert json.dumps(checkpoint["callbacks"])
    assert (tmp_path / "checkpoints" / "last.ckpt").stat().st_size < 20_000


def test_a_save_that_fails_leaves_the_one_before_whole(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(4, checkpoint_every=1), [0.4, 0.3, 0.2, 0.1])
    save = toy.on_save_checkpoint

    def failing_save(checkpoint):
        if toy.counters["iteration"] == 3:
            raise OSError("disk full")
        save(checkpoint)

    toy.on_save_checkpoint = failing_save
    with pytest.raises(OSError, match="disk full"):
        fit(toy, tmp_path)
    assert (iterations(tmp_path, "best"), iterations(tmp_path, "last")) == (1, 2)


def test_a_resumed_run_ends_where_the_unbroken_one_ends(tmp_path, make_config, make_toy, fit):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        folder.mkdir()
    config, scores = make_config(5, checkpoint_every=2), [0.1, 0.9, 0.2, 0.3, 0.5]
    whole = make_toy(config, scores)
    fit(whole, straight)
    first = make_toy(config, scores)
    first.fail = {2: RuntimeError("killed")}
    with pytest.raises(RuntimeError, match="killed"):
        fit(first, broken)
    second = make_toy(config, scores)
    trainer = fit(second, broken, resume_from=2)
    assert torch.equal(second.weight, whole.weight)
    assert trainer.global_step == 10
    assert (iterations(broken, "last"), iterations(broken, "best")) == (
        5,
        2,
    )  # the best of the first part stands


def test_adapters_are_replaced_whole(tmp_path, make_config, make_toy, fit):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "stale").write_text("of another run")
    fit(make_toy(make_config(3, checkpoint_every=1), [0.1, 0.2, 0.3]), tmp_path)
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["after_3"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".adapters")]


def test_an_unknown_objective_is_answered_with_the_nearest(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(2, objective="objective/scor"), [0.1, 0.2])
    with pytest.raises(
        UserError, match=r"objective=objective/scor is no metric .*did you mean objective/score"
    ):
        fit(toy, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_disk_that_is_full_for_a_while_costs_that_checkpoint(
    tmp_path, make_config, make_toy, fit, monkeypatch, capsys
):
    """Iterations 1, 2 and 3 of four meet a full disk; what was saved before is kept until the next fits."""
    toy = make_toy(make_config(4, checkpoint_every=1), [0.4, 0.3, 0.2, 0.1])
    seen = []

    class Usage:
        @property
        def free(self):
            seen.append(iterations(tmp_path, "last") if seen else 0)
            return 10**12 if len(seen) in (1, 4) else 5

    monkeypatch.setattr("rlhf_lightning.callbacks.checkpoint.shutil.disk_usage", lambda folder: Usage())
    fit(toy, tmp_path)
    assert seen == [0, 1, 1, 1] and iterations(tmp_path, "last") == 4
    said = capsys.readouterr().err
    assert "iteration 1 is not saved: the disk is full" in said and "iteration 2 is not saved" in said
    assert "iteration 3" not in said
