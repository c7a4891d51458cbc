"""held_out.json and held_out.png: what a reward model says of pairs that it has not learned from."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.files import write_json
from rlhf_lightning.report.reward_model import draw
from rlhf_lightning.stages.reward import RewardModel
from rlhf_lightning.tracking import IterationWandbLogger


class HeldOut(Callback):
    """Writes the scores at each look at the held-out pairs; draws the last, and hands the picture to W&B."""

    def __init__(self, run_dir: Path) -> None:
        self._data, self._picture = run_dir / "held_out.json", run_dir / "held_out.png"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, RewardModel)
        looked = "eval/accuracy" in pl_module.metrics
        if pl_module.measured is None or not looked or not trainer.is_global_zero:
            return
        write_json(self._data, {name: values.tolist() for name, values in pl_module.measured.items()})
        if trainer.current_epoch + 1 < pl_module.total_iterations:
            return
        draw(self._data, self._picture)
        for logger in trainer.loggers:
            if isinstance(logger, IterationWandbLogger):
                logger.log_picture("held_out", self._picture, iteration=trainer.current_epoch)
