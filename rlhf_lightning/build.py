"""Builds the parts of a run from its validated config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything

from rlhf_lightning.callbacks import build_callbacks
from rlhf_lightning.config.schema import Config, LearnedRewardConfig
from rlhf_lightning.data.datamodule import PromptDataModule
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import ppo_cast
from rlhf_lightning.rewards.build import build_reward
from rlhf_lightning.stages.ppo import PPO
from rlhf_lightning.tracking import build_loggers


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    module: PPO
    data: PromptDataModule


def build_parts(config: Config) -> Parts:
    """Load the backbone, put the roles on it, build reward and data.

    The seed is set first: fresh adapters and heads are the same on every rank and in every process.
    """
    seed_everything(config.seed, verbose=False)
    device = pick_device(config.trainer.accelerator)
    backbone = load_backbone(config.model, device=device)
    actor_critic = ActorCritic(
        backbone,
        config.model,
        cast=ppo_cast(config.model, reward_path=_learned_path(config), critic=config.has_critic),
        temperature=config.generation.temperature,
    )
    reward = build_reward(
        config.reward,
        score=actor_critic.score,
        tokenizer=backbone.tokenizer,
        context=backbone.context_length,
        device=device,
    )
    data = PromptDataModule(
        config.data,
        backbone.tokenizer,
        room=backbone.context_length - config.generation.max_new_tokens,
        prompts_per_iteration=config.ppo.prompts_per_iteration,
        samples_per_prompt=config.ppo.samples_per_prompt,
        seed=config.seed,
    )
    return Parts(PPO(actor_critic, reward, config), data)


def build_trainer(config: Config, run_dir: Path, *, start: int) -> Trainer:
    """Lightning's Trainer: one epoch is one iteration."""
    return Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        max_epochs=config.ppo.iterations,
        logger=build_loggers(config, run_dir),
        callbacks=build_callbacks(config, run_dir, resume_from=start),
        default_root_dir=run_dir,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        inference_mode=False,
    )


def pick_device(accelerator: str) -> torch.device:
    """The device that Lightning will use for this accelerator, known before the model is loaded onto it."""
    kinds = {"gpu": "cuda", "auto": "cuda" if torch.cuda.is_available() else "cpu"}
    kind = kinds.get(accelerator, accelerator)
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.accelerator=gpu needs a CUDA device, and torch finds none: take cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("trainer.accelerator=mps needs an Apple GPU, and torch finds none: take cpu")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def _learned_path(config: Config) -> str | None:
    """Folder of the one reward adapter on the backbone, wherever in the reward it is named."""
    singles = config.single_rewards.values()
    paths = {single.path for single in singles if isinstance(single, LearnedRewardConfig)}
    if len(paths) > 1:
        raise UserError(f"reward.parts: at most one learned reward fits the backbone, found {sorted(paths)}")
    return next(iter(paths), None)
