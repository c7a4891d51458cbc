"""Runs of the PPO stage on a real Trainer, built as ``train.py`` builds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from rlhf_lightning.build import build_parts
from rlhf_lightning.config.schema import Config
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.types import Scores

SIZES = {"prompts_per_iteration": 8, "minibatch_size": 4, "micro_batch_size": 2, "epochs": 2, "iterations": 2}
PLAIN = {"quantization": "none", "dtype": "float32"}


def share_of_letter(prompts, responses) -> Scores:
    """A smooth reward of the text alone."""
    scores = torch.tensor([sum(c in "aeiou" for c in text) / max(len(text), 1) for text in responses])
    return Scores(scores, {"vowels": scores})


class Recorder(Callback):
    """Keeps each iteration's metrics, rollout and trained tensors; ``states[0]`` is from before the first."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self.rollouts: list = []
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer, pl_module) -> None:
        self.states.append(self._state(pl_module))

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.history.append(dict(pl_module.metrics))
        self.rollouts.append(pl_module.rollout)
        self.states.append(self._state(pl_module))

    @staticmethod
    def _state(module) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture
def make_run(model_folders: dict[str, Path], tmp_path: Path):
    """``make_run(ppo={...}, model={...}) -> (module, history)`` after fit; one row of metrics an iteration.

    ``prepare`` is called with the module before the fit; ``module.recorder`` and ``module.used_trainer`` tell
    the rest.
    """

    def make(
        *, family="llama", ppo=None, model=None, advantage=None, generation=None, reward=share_of_letter,
        prepare=None, resume=None, save=None, seed=0,
    ):  # fmt: skip
        file = tmp_path / "prompts.txt"
        file.write_text("the soup\na slow waiter\nwe\nnothing on the menu was\nthe bread\n")
        config = Config(
            seed=seed,
            ppo=SIZES | (ppo or {}),
            advantage=advantage or {"kind": "gae"},
            model=PLAIN | {"path": str(model_folders[family])} | (model or {}),
            generation={"max_new_tokens": 8} | (generation or {}),
            data={"path": str(file)},
            reward={"kind": "regex", "pattern": "a"},
            trainer={"accelerator": "cpu"},
        )
        parts = build_parts(config)
        module = parts.module
        module.reward = reward
        if prepare is not None:
            prepare(module)
        recorder = Recorder()
        trainer = Trainer(
            max_epochs=config.ppo.iterations, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            default_root_dir=tmp_path, callbacks=[recorder],
        )  # fmt: skip
        trainer.fit(module, datamodule=parts.data, ckpt_path=resume, weights_only=True)
        if save is not None:
            trainer.save_checkpoint(save)
        module.used_trainer, module.recorder = trainer, recorder
        return module, recorder.history

    return make


@pytest.fixture
def one_step(make_run):
    """``one_step(ppo={...}, ...) -> module``: 8 answers and one optimizer step unless told otherwise."""
    small = {
        "prompts_per_iteration": 8,
        "minibatch_size": 8,
        "micro_batch_size": 8,
        "epochs": 1,
        "iterations": 1,
    }

    def make(*, ppo=None, **rest):
        return make_run(ppo=small | (ppo or {}), **rest)[0]

    return make


@pytest.fixture
def supervised(model_folders: dict[str, Path]):
    """``supervised(SFT, sft_cast, "sft", held_out=[], lr=...)``: a stage of one step on the small Llama."""

    def make(stage, cast, section: str, *, held_out, **options):
        name = "reward" if section == "reward_model" else section
        config = Config(
            stage={"name": name},
            model={"path": str(model_folders["llama"])} | PLAIN,
            reward={"kind": "length", "target": 3},
            **{section: options},
        )
        torch.manual_seed(0)
        roles = ActorCritic(
            load_backbone(config.model), config.model, cast=cast(config.model), temperature=1.0
        )
        return stage(roles, config, getattr(config, section), steps=1, held_out=held_out)

    return make
