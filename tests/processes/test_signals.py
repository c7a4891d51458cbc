"""Ctrl-C and SIGTERM: the optimizer step is finished, all is saved, the rest is what it would have been."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from tests.processes.words import COMMON, PPO, STAGES

TOKEN = "rlhf_lightning.rollout.generate:_Batch._choose"
STEP = "rlhf_lightning.stages.base:Stage.step"


def about(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def stop(runs, words, folder, at, *signals) -> str:
    """Start a run that is sent signals; what it said."""
    log = folder.with_suffix(".txt")
    code = runs(*words, f"hydra.run.dir={folder}", at=at, signals=signals, log=log)
    assert code == 128 + signals[0], log.read_text()
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    return log.read_text()


def test_sigterm_in_the_update(runs, same, tmp_path):
    """The sixth of sixteen optimizer steps, the second of an iteration, is taken and counted."""
    folder = tmp_path / "run"
    said = stop(runs, PPO, folder, f"{STEP}@6", signal.SIGTERM)
    assert f"continue with: python train.py resume={folder}" in said
    checkpoint = about(folder)
    assert checkpoint["stage"]["counters"]["iteration"] == 1
    assert checkpoint["stage"]["counters"]["optimizer_steps"] == 6
    assert checkpoint["ppo"]["unfinished"]["stats"]["done"] == 2
    assert runs(f"resume={folder}") == 0, runs.log()
    same(runs.unbroken(PPO), folder)


@pytest.mark.resume
@pytest.mark.parametrize("at", [
    f"{TOKEN}@3", f"{TOKEN}@14", "rlhf_lightning.models.actor_critic:ActorCritic.reference@2", f"{STEP}@4",
    f"{STEP}@9", "rlhf_lightning.callbacks.table:Table.append@3", f"{STEP}@16+",
])  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_anywhere(runs, same, tmp_path, at, number):
    folder = tmp_path / "run"
    if at.endswith("@16+"):  # nothing is left to stop: the last iteration just ends
        assert runs(*PPO, f"hydra.run.dir={folder}", at=at, signals=[number]) == 0, runs.log()
    else:
        stop(runs, PPO, folder, at, number)
        assert runs(f"resume={folder}") == 0, runs.log()
    same(runs.unbroken(PPO), folder)


@pytest.mark.resume
def test_stopped_killed_and_stopped(runs, same, tmp_path):
    folder = tmp_path / "run"
    stop(runs, PPO, folder, f"{STEP}@2", signal.SIGINT)
    assert runs(f"resume={folder}", at=f"{STEP}@1") == -signal.SIGKILL
    assert runs(f"resume={folder}", at=f"{STEP}@1", signals=[signal.SIGTERM]) == 143
    assert about(folder)["ppo"]["unfinished"]["stats"]["done"] == 3
    assert runs(f"resume={folder}") == 0, runs.log()
    same(runs.unbroken(PPO), folder)


@pytest.mark.parametrize("stage", ["dpo", pytest.param("sft", marks=pytest.mark.resume),
                                   pytest.param("reward", marks=pytest.mark.resume)])  # fmt: skip
def test_the_other_stages(runs, same, tmp_path, stage):
    folder, words = tmp_path / "run", [*COMMON, *STAGES[stage]]
    stop(runs, words, folder, f"{STEP}@5", signal.SIGINT)
    assert about(folder)["so_far"]["done"] == 2
    assert runs(f"resume={folder}") == 0, runs.log()
    same(runs.unbroken(words), folder)


def test_a_second_ctrl_c_stops_at_once(runs, tmp_path):
    """In the third iteration: what the second one saved is there, and is not touched."""
    folder = tmp_path / "run"
    stop(runs, PPO, folder, f"{STEP}@10", signal.SIGINT, signal.SIGINT)
    assert about(folder)["stage"]["counters"]["optimizer_steps"] == 8
