"""The pipeline's configs by hand, and one whole run of it, short, killed in the middle and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.config.cli import main
from rlhf_lightning.config.schema import Config
from rlhf_lightning.pipeline import learned_from, stages

ROOT = Path(__file__).resolve().parents[1]
GOLD = {"kind": "function", "function": "rlhf_lightning.assets.gold:gold"}
TINY = {"learned": {"reward": {"kind": "learned", "path": "tiny"}}, "gold": {"weight": 0.0, "reward": GOLD}}
SHORT = ("data.limit=16", "generation.max_new_tokens=8", "evaluate.prompts=4", "evaluate.bootstrap=100")


def config(**sections) -> Config:
    reward = sections.pop("reward", {"kind": "combined", "parts": TINY})
    return Config(stage={"name": "pipeline"}, reward=reward, **sections)


def test_each_stage_builds_on_the_one_before():
    every = stages(config(), Path("/run"))
    assert list(every) == ["sft", "reward", "ppo", "dpo", "evaluate_ppo", "evaluate_dpo"]
    assert every["sft"].model.adapter is None
    for name in ("reward", "ppo", "dpo", "evaluate_ppo"):
        assert every[name].model.adapter == "/run/sft"
    assert every["ppo"].reward.parts["learned"].reward.path == "/run/reward"
    assert every["ppo"].reward.parts["gold"].reward == config().reward.parts["gold"].reward
    assert every["evaluate_ppo"].run == "/run/ppo" and every["evaluate_ppo"].evaluate.against == "/run/dpo"
    assert every["evaluate_dpo"].run == "/run/dpo" and every["evaluate_dpo"].evaluate.against is None
    assert [c.stage.name for c in every.values()] == ["sft", "reward", "ppo", "dpo", "evaluate", "evaluate"]


def test_each_stage_is_judged_by_its_own_objective():
    targets = [c.target[0] for c in stages(config(objective="objective/kl"), Path("/run")).values()]
    assert targets == [
        "eval/perplexity",
        "eval/accuracy",
        "objective/score",
        "eval/accuracy",
        *["eval/win_rate"] * 2,
    ]


def test_a_reward_without_a_learned_part_gives_way_to_the_trained_one():
    for given in ({"kind": "length", "target": 3}, {"kind": "combined", "parts": {"gold": {"reward": GOLD}}}):
        found = learned_from(config(reward=given).reward, "/run/reward")
        assert found.kind == "learned" and found.path == "/run/reward"
    kept = learned_from(config(reward={"kind": "learned", "batch_size": 5}).reward, "/run/reward")
    assert kept.path == "/run/reward" and kept.batch_size == 5


@pytest.mark.slow
def test_a_pipeline_runs_and_a_resumed_one_repeats_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    command = ["experiment=pipeline", "debug=default", "logger=none", *SHORT]
    assert main(ROOT, [*command, f"hydra.run.dir={run}"]) == 0
    rows = json.loads((run / "pipeline.json").read_text())
    assert [row["stage"] for row in rows] == ["sft", "reward", "ppo", "dpo", "evaluate_ppo", "evaluate_dpo"]
    assert all(row["value"] is not None for row in rows)
    first = {path: path.stat().st_mtime_ns for path in run.glob("*/metrics.csv")}
    evaluation = (run / "evaluate_dpo" / "evaluation.json").read_text()
    (run / "evaluate_dpo" / "summary.json").unlink()  # as if it had been killed there
    assert main(ROOT, [f"resume={run}"]) == 0
    assert {path: path.stat().st_mtime_ns for path in run.glob("*/metrics.csv")} == first
    assert (run / "evaluate_dpo" / "evaluation.json").read_text() == evaluation
