"""The guard: what trips, what it says, that it saves, and that a resumed run repeats it."""

from __future__ import annotations

import json

import pytest

from rlhf_lightning.callbacks import build_callbacks
from rlhf_lightning.callbacks.guard import Guard, watched_parts
from rlhf_lightning.callbacks.watches import judge_held_out, judge_rollout, judge_second, sentence
from rlhf_lightning.config.guard import GuardConfig
from rlhf_lightning.config.schema import Config

HEALTHY = {
    "objective/kl": 5.0, "policy/ratio_max": 1.5, "objective/entropy": 2.0, "rollout/length_mean": 20.0,
    "rollout/eos_rate": 0.9, "rollout/unique_fraction": 1.0,
}  # fmt: skip
FIRST = {"objective/entropy": [2.0], "rollout/length_mean": [20.0], "rollout/eos_rate": [0.9]}
LIMITS = GuardConfig(window=1, kl=10, ratio=3, entropy=0.25, length=2, unended=0.75, unique=0.5, second=2)
COMBINED = {
    "kind": "combined",
    "parts": {
        "trained": {"weight": 1.0, "reward": {"kind": "length", "target": 3}},
        "gold": {"weight": 0.0, "reward": {"kind": "length", "target": 4}},
    },
}


@pytest.mark.parametrize(
    ("watch", "figure", "inside", "outside", "limit"),
    [
        ("kl", "objective/kl", 10.0, 10.1, 10),
        ("ratio", "policy/ratio_max", 3.0, 3.1, 3),
        ("entropy", "objective/entropy", 0.5, 0.49, 0.5),  # a quarter of 2
        ("length", "rollout/length_mean", 40.0, 40.1, 40),  # twice 20
        ("unended", "rollout/eos_rate", 0.25, 0.24, 0.25),
        ("unique", "rollout/unique_fraction", 0.5, 0.49, 0.5),
    ],
)
def test_each_watch_trips_beyond_its_limit_and_not_at_it(watch, figure, inside, outside, limit):
    assert judge_rollout(HEALTHY | {figure: inside}, FIRST, LIMITS) == []
    (trip,) = judge_rollout(HEALTHY | {figure: outside}, FIRST, LIMITS)
    assert (trip.watch, trip.figure, trip.value, trip.limit) == (watch, figure, outside, limit)
    assert judge_rollout(HEALTHY | {figure: float("nan")}, FIRST, LIMITS) == []
    assert judge_rollout(HEALTHY | {figure: outside}, FIRST, LIMITS.model_copy(update={watch: None})) == []
    said = sentence(trip, iteration=6)
    assert said.startswith(f"iteration 7: {figure} is {outside:.4g}, ")
    assert f"the limit {limit:.4g}" in said and f"guard.{watch}=null" in said


def test_what_is_measured_from_the_start_waits_for_it():
    metrics = HEALTHY | {"objective/entropy": 0.01, "rollout/length_mean": 500.0, "rollout/eos_rate": 0.0}
    assert judge_rollout(metrics, FIRST, LIMITS.model_copy(update={"window": 2})) == []
    assert [trip.watch for trip in judge_rollout(metrics, FIRST, LIMITS)] == ["entropy", "length", "unended"]


def test_a_run_whose_answers_never_ended_is_not_told_so():
    never = FIRST | {"rollout/eos_rate": [0.0]}
    assert judge_rollout(HEALTHY | {"rollout/eos_rate": 0.0}, never, LIMITS) == []


def test_a_second_reward_that_parts_from_the_score():
    """Window 1: best 9, last 1, fall 8; differences 0, 0, -8: s² = 64/6, error 4.62, 1.73 errors."""
    scores, gold = [1.0, 2.0, 3.0, 4.0], [9.0, 9.0, 9.0, 1.0]
    assert judge_second(scores, {"reward/gold": gold}, LIMITS) == []
    (trip,) = judge_second(scores, {"reward/gold": gold}, LIMITS.model_copy(update={"second": 1.0}))
    assert (trip.watch, trip.figure, trip.value) == ("second", "reward/gold", 1.0)
    assert trip.limit == pytest.approx(9 - (2 * 64 / 6) ** 0.5)
    off = LIMITS.model_copy(update={"second": None})
    assert judge_second(scores, {"reward/gold": gold}, off) == []


@pytest.mark.parametrize(
    ("low", "high", "trips"), [(0.6, 0.4, 1), (0.5, 0.4, 0), (0.6, 0.5, 0), (0.4, 0.3, 0)]
)
def test_held_out_win_rates_that_contradict_each_other(low, high, trips):
    metrics = {"eval/win_rate_low": low, "eval/gold_win_rate_high": high}
    assert len(judge_held_out(metrics, ["gold"], LIMITS)) == trips
    assert judge_held_out(metrics, [], LIMITS) == []


def test_the_parts_that_only_watch_are_those_of_weight_zero():
    assert watched_parts(Config.model_validate({"reward": COMBINED}).reward) == ["gold"]
    assert watched_parts(Config.model_validate({"reward": {"kind": "length", "target": 3}}).reward) == []


# ---- in a run ---------------------------------------------------------------------------------------


@pytest.fixture
def make_guarded(make_config, make_toy):
    """``make_guarded([1, 20, ...], kl=10, action="stop") -> Toy`` whose KL takes these values."""

    def make(kls: list[float], **guard):
        config = make_config(len(kls)).model_copy(update={"guard": GuardConfig(**guard)})
        toy = make_toy(config, [0.1] * len(kls))
        toy.extra = {k: {"objective/kl": value} for k, value in enumerate(kls)}
        return toy

    return make


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_warning_is_said_once_until_the_figure_has_recovered(tmp_path, make_guarded, fit, capsys):
    fit(make_guarded([1, 20, 30, 1, 40, 50], kl=10), tmp_path)
    found = summary(tmp_path)
    assert (found["status"], found["iterations"]) == ("finished", 6)
    assert [(w["iteration"], w["watch"], w["value"]) for w in found["warnings"]] == [
        (1, "kl", 20),
        (4, "kl", 40),
    ]
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert told == [f"warning: {w['text']}" for w in found["warnings"]]
    assert "objective/kl is 20, above the limit 10 (guard.kl)" in told[0]
    assert "ppo.beta" in told[0]


def test_a_stop_saves_the_iteration_and_says_why(tmp_path, make_guarded, fit, capsys):
    """Item 82l of the list of faults: a KL of 50 where 6 is the target ends the run, saved."""
    trainer = fit(make_guarded([1, 2, 50, 3, 4], kl=6, action="stop"), tmp_path)
    found = summary(tmp_path)
    assert (found["status"], found["iterations"], found["total_iterations"]) == ("stopped", 3, 5)
    assert found["error"].startswith("iteration 3: objective/kl is 50, above the limit 6 (guard.kl)")
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert [p.name for p in (tmp_path / "adapters").iterdir()] == ["after_3"]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 3
    assert trainer.current_epoch == 3


def test_a_stopped_run_stops_again_or_goes_on_as_told(tmp_path, make_guarded, fit):
    kl = [1, 50, 50, 50]
    fit(make_guarded(kl, kl=6, action="stop"), tmp_path)
    fit(make_guarded(kl, kl=6, action="stop"), tmp_path, resume_from=2)
    assert (summary(tmp_path)["status"], summary(tmp_path)["iterations"]) == ("stopped", 3)
    fit(make_guarded(kl, kl=6), tmp_path, resume_from=3)
    assert (summary(tmp_path)["status"], summary(tmp_path)["error"]) == ("finished", None)


def test_in_the_last_iteration_there_is_nothing_to_stop(tmp_path, make_guarded, fit):
    fit(make_guarded([1, 50], kl=6, action="stop"), tmp_path)
    assert summary(tmp_path)["status"] == "finished"
    assert [w["watch"] for w in summary(tmp_path)["warnings"]] == ["kl"]


def test_a_resumed_run_warns_as_the_unbroken_one(tmp_path, make_config, make_toy, fit):
    """Entropy 2 and 4 at the start, 3 their mean; 0.2 is below a tenth of it, before and after the break."""
    entropy = [2.0, 4.0, 3.0, 0.2, 0.1, 3.0, 0.2]
    gold = [1.0, 1.1, 1.0, 1.1, 0.0, 0.1, 0.0]
    config = make_config(7, checkpoint_every=1).model_copy(
        update={
            "guard": GuardConfig(window=2, second=1.5),
            "reward": Config.model_validate({"reward": COMBINED}).reward,
        }
    )

    def toy():
        made = make_toy(config, [0.1 * k for k in range(7)])
        made.extra = {
            k: {"objective/entropy": e, "reward/gold": g}
            for k, (e, g) in enumerate(zip(entropy, gold, strict=True))
        }
        return made

    for folder in ("straight", "broken"):
        (tmp_path / folder).mkdir()
    fit(toy(), tmp_path / "straight")
    cut = toy()
    cut.fail = {4: RuntimeError("killed")}
    with pytest.raises(RuntimeError, match="killed"):
        fit(cut, tmp_path / "broken")
    assert [w["iteration"] for w in summary(tmp_path / "broken")["warnings"]] == [3]
    fit(toy(), tmp_path / "broken", resume_from=4)
    warnings = summary(tmp_path / "straight")["warnings"]
    assert summary(tmp_path / "broken")["warnings"] == warnings
    assert [(w["iteration"], w["watch"]) for w in warnings] == [(3, "entropy"), (5, "second"), (6, "entropy")]


def test_the_guard_judges_before_all_that_must_know_of_the_last_iteration(tmp_path, make_config):
    names = [type(callback).__name__ for callback in build_callbacks(make_config(3), tmp_path)]
    assert (
        names.index("Throughput") < names.index("Guard") < names.index("Samples") < names.index("Checkpoints")
    )
    sft = make_config(3).model_copy(
        update={"stage": Config.model_fields["stage"].default.model_copy(update={"name": "sft"})}
    )
    assert not any(isinstance(callback, Guard) for callback in build_callbacks(sft, tmp_path))
