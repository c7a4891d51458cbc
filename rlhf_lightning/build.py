"""Builds the parts of a run from its validated config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from rlhf_lightning.callbacks import build_callbacks
from rlhf_lightning.config.algorithms import TrainingConfig
from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.data.datamodule import PromptDataModule
from rlhf_lightning.data.demonstrations import load_demonstrations
from rlhf_lightning.data.encoding import answered_pair, judged_pair
from rlhf_lightning.data.examples import ExampleDataModule, total_steps
from rlhf_lightning.data.held_out import share_held_out
from rlhf_lightning.data.preferences import load_split, pair_prompts
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import Backbone, load_backbone
from rlhf_lightning.models.cast import dpo_cast, ppo_cast, reward_cast, sft_cast
from rlhf_lightning.rewards.base import Reward
from rlhf_lightning.rewards.build import build_reward
from rlhf_lightning.stages.base import Stage
from rlhf_lightning.stages.dpo import DPO
from rlhf_lightning.stages.ppo import PPO
from rlhf_lightning.stages.reward import RewardModel
from rlhf_lightning.stages.sft import SFT
from rlhf_lightning.tracking import build_loggers


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    module: Stage
    data: PromptDataModule | ExampleDataModule[Any]


def build_parts(config: Config, backbone: Backbone | None = None) -> Parts:
    """Load the backbone, put the stage's roles on it, read its data.

    The seed is set first: fresh adapters and heads are the same on every rank and in every process.

    Args:
        backbone: one that is loaded already; None: the one that ``config.model`` names.
    """
    seed_everything(config.seed, verbose=False)
    builders = {"ppo": _ppo, "sft": _sft, "reward": _reward_model, "dpo": _dpo}
    backbone = backbone or load_backbone(config.model, device=pick_device(config))
    return builders[config.stage.name](config, backbone)


def _ppo(config: Config, backbone: Backbone) -> Parts:
    cast = ppo_cast(config.model, reward_path=learned_path(config), critic=config.has_critic)
    actor_critic = ActorCritic(backbone, config.model, cast=cast, temperature=config.generation.temperature)
    data = PromptDataModule(
        config.data,
        backbone.tokenizer,
        room=backbone.context_length - config.generation.max_new_tokens,
        prompts_per_iteration=config.ppo.prompts_per_iteration,
        samples_per_prompt=config.ppo.samples_per_prompt,
        seed=config.seed,
        part="train",
        share=share_held_out(config.data.held_out_share, stage="ppo", evaluating=config.evaluate.every > 0),
    )
    return Parts(PPO(actor_critic, reward_on(actor_critic, config), config), data)


def _sft(config: Config, backbone: Backbone) -> Parts:
    options = config.sft
    length = min(options.max_length, backbone.context_length)
    train, held_out = load_demonstrations(config.data, backbone.tokenizer, max_length=length)
    actor_critic = ActorCritic(backbone, config.model, cast=sft_cast(config.model), temperature=1.0)
    module = SFT(actor_critic, config, options, steps=total_steps(len(train), options), held_out=held_out)
    return Parts(module, _examples(train, held_out, options, config))


def _reward_model(config: Config, backbone: Backbone) -> Parts:
    options = config.reward_model
    length = min(options.max_length, backbone.context_length)
    train, held_out = (
        [
            judged_pair(backbone.tokenizer, text, p.chosen, p.rejected, max_length=length, margin=p.margin)
            for p, (_, text) in zip(pairs, pair_prompts(pairs, config.data, backbone.tokenizer), strict=True)
        ]
        for pairs in load_split(config.data)
    )
    actor_critic = ActorCritic(backbone, config.model, cast=reward_cast(config.model), temperature=1.0)
    module = RewardModel(
        actor_critic, config, options, steps=total_steps(len(train), options), held_out=held_out
    )
    return Parts(module, _examples(train, held_out, options, config))


def _dpo(config: Config, backbone: Backbone) -> Parts:
    options, tokenizer = config.dpo, backbone.tokenizer
    length = min(options.max_length, backbone.context_length)
    train, held_out = (
        [
            answered_pair(tokenizer, ids, p.chosen, p.rejected, max_length=length)
            for p, (ids, _) in zip(pairs, pair_prompts(pairs, config.data, tokenizer), strict=True)
        ]
        for pairs in load_split(config.data)
    )
    actor_critic = ActorCritic(backbone, config.model, cast=dpo_cast(config.model), temperature=1.0)
    module = DPO(actor_critic, config, options, steps=total_steps(len(train), options), held_out=held_out)
    return Parts(module, _examples(train, held_out, options, config))


def _examples(
    train: list[Any], held_out: list[Any], options: TrainingConfig, config: Config
) -> ExampleDataModule:
    report = f"{len(train)} examples from {config.data.path}, {len(held_out)} held out"
    return ExampleDataModule(
        train, held_out, options, seed=config.seed, shuffle=config.data.shuffle, report=report
    )


def build_trainer(config: Config, run_dir: Path, *, iterations: int, start: int) -> Trainer:
    """Lightning's Trainer: one epoch is one iteration, and ``start`` is the first that is run."""
    return Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        max_epochs=iterations,
        logger=build_loggers(config, run_dir, resume_from=start),
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


def pick_device(config: Config) -> torch.device:
    """The device that Lightning will use, known before the model is loaded onto it."""
    accelerator = config.trainer.accelerator
    kinds = {"gpu": "cuda", "auto": "cuda" if torch.cuda.is_available() else "cpu"}
    kind = kinds.get(accelerator, accelerator)
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.accelerator=gpu needs a CUDA device, and torch finds none: take cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("trainer.accelerator=mps needs an Apple GPU, and torch finds none: take cpu")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def reward_on(actor_critic: ActorCritic, config: Config) -> Reward:
    """The reward that the config describes; a learned one is the reward role of these roles."""
    return build_reward(
        config.reward,
        score=actor_critic.score,
        tokenizer=actor_critic.backbone.tokenizer,
        context=actor_critic.backbone.context_length,
        device=actor_critic.device,
    )


def learned_path(config: Config) -> str | None:
    """Folder of the one reward adapter on the backbone, wherever in the reward it is named."""
    singles = config.single_rewards.values()
    paths = {single.path for single in singles if isinstance(single, LearnedRewardConfig)}
    if len(paths) > 1:
        raise UserError(f"reward.parts: at most one learned reward fits the backbone, found {sorted(paths)}")
    return next(iter(paths), None)
