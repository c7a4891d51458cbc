"""The real stage under a bare Trainer: no trackers, no files, no console."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.build import build_parts
from rlhf_lightning.config.schema import Config
from rlhf_lightning.models.backbone import Backbone
from rlhf_lightning.run import quiet
from rlhf_lightning.stages.ppo import PPO


class AfterIteration(Callback):
    """Calls ``started(stage)`` before the first iteration, ``tell(stage)`` when one's metrics are there."""

    def __init__(self, tell: Callable[[PPO], None], started: Callable[[PPO], None]) -> None:
        self.tell, self.started = tell, started

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        self.started(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        assert isinstance(pl_module, PPO)
        self.tell(pl_module)


def train(
    config: Config,
    folder: Path,
    tell: Callable[[PPO], None],
    *,
    started: Callable[[PPO], None] = lambda stage: None,
    backbone: Backbone | None = None,
) -> PPO:
    """Build the run that ``config`` describes, train it where it says, and return the stage.

    Args:
        folder: where Lightning may write.
        tell: called after each iteration.
        started: called before the first.
        backbone: one that is loaded already; None: the one that ``config.model`` names.

    Raises:
        KeyboardInterrupt: Lightning swallows it and says so; here it goes on.
    """
    quiet()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\..*")
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    parts = build_parts(config, backbone)
    assert isinstance(parts.module, PPO)
    trainer = Trainer(
        accelerator=config.trainer.accelerator,
        devices=1,
        max_epochs=config.ppo.iterations,
        callbacks=[AfterIteration(tell, started)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(parts.module, datamodule=parts.data)
    if trainer.interrupted:
        raise KeyboardInterrupt
    return parts.module
