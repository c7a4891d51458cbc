"""A run killed anywhere and resumed is, byte for byte, the run that nobody killed."""

from __future__ import annotations

import os
import random
import signal

import pytest

from tests.processes.words import COMMON, PPO, STAGES

SAVING = "rlhf_lightning.callbacks.checkpoint"
POINTS = [
    # rollout: the first token of all; in the second iteration; after a checkpoint
    "rlhf_lightning.rollout.generate:_Batch._choose@1",
    "rlhf_lightning.rollout.generate:_Batch._choose@12",
    "rlhf_lightning.rollout.generate:_Batch._choose@40",
    # judging and scoring
    "rlhf_lightning.models.actor_critic:ActorCritic.score@1",
    "rlhf_lightning.models.actor_critic:ActorCritic.reference@6",
    "rlhf_lightning.rollout.collect:shape_scores@3+",
    # update: 4 optimizer steps an iteration
    "rlhf_lightning.stages.base:Stage.step@1",
    "rlhf_lightning.stages.base:Stage.step@6",
    "rlhf_lightning.stages.base:Stage.step@11+",
    "rlhf_lightning.stages.base:Stage.step@16+",
    # the figures and samples of an iteration
    "rlhf_lightning.stages.ppo:rollout_metrics@3",
    "rlhf_lightning.callbacks.samples:_gather@3",
    "rlhf_lightning.callbacks.table:Table.append@1",
    "rlhf_lightning.callbacks.table:Table.append@6",
    "rlhf_lightning.callbacks.table:Table.append@8+",
    # saving: before and after the checkpoint has its name, between it and the adapters, inside their exchange
    "lightning.pytorch:Trainer.save_checkpoint@1",
    "lightning.pytorch:Trainer.save_checkpoint@2+",
    f"{SAVING}:publish@1",
    f"{SAVING}:publish@2+",
    f"{SAVING}:Checkpoints._save_adapters@1",
    "os:rename@2",
    "os:rename@3+",
    # reports, the last of them after the last checkpoint
    "rlhf_lightning.callbacks.evaluation:write_evaluation@2",
    "rlhf_lightning.callbacks.before_after:write_json@1",
    "rlhf_lightning.callbacks.summary:write_json@1",
]


@pytest.mark.resume
@pytest.mark.parametrize("point", POINTS)
def test_ppo(runs, same, tmp_path, point):
    runs.kill_and_resume(PPO, [point], tmp_path / "run")
    same(runs.unbroken(PPO), tmp_path / "run")


@pytest.mark.parametrize("kills", [
    ["rlhf_lightning.rollout.generate:_Batch._choose@8", "rlhf_lightning.stages.base:Stage.step@10",
     "rlhf_lightning.stages.base:Stage.step@4"],
    [f"{SAVING}:publish@2", "os:rename@1"],
], ids=["rollout, update, update", "saving twice"])  # fmt: skip
def test_more_than_once(runs, same, tmp_path, kills):
    runs.kill_and_resume(PPO, kills, tmp_path / "run")
    same(runs.unbroken(PPO), tmp_path / "run")


@pytest.mark.resume
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("step", [2, 8])
def test_the_other_stages(runs, same, tmp_path, stage, step):
    words = [*COMMON, *STAGES[stage]]
    runs.kill_and_resume(words, [f"rlhf_lightning.stages.base:Stage.step@{step}+"], tmp_path / "run")
    same(runs.unbroken(words), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.skipif("KILLS" not in os.environ, reason="by hand: KILLS=200")
def test_at_random(runs, same, tmp_path):
    """KILLS times: one of the functions above, at a call drawn at random; some are never reached."""
    draw = random.Random(int(os.environ.get("SEED", "0")))
    killed = 0
    while killed < int(os.environ["KILLS"]):
        name = draw.choice(POINTS).partition("@")[0]
        folder = tmp_path / str(killed)
        code = runs(*PPO, f"hydra.run.dir={folder}", at=f"{name}@{draw.randrange(1, 30)}")
        if code == -signal.SIGKILL:
            killed += 1
            assert runs(f"resume={folder}") == 0, runs.log()
        same(runs.unbroken(PPO), folder)
