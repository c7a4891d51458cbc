"""held_out.json and held_out.png: what a reward model says of pairs that it has not learned from."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.files import write_json
from rlhf_lightning.report.reward_model import draw
from rlhf_lightning.stages.reward import RewardModel
from rlhf_lightning.tracking import IterationWandbLogger


class HeldOut(Callback):
    """Writes the scores of the last measurement, draws them, and hands the picture to W&B."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, RewardModel)
        if pl_module.measured is None or not trainer.is_global_zero:
            return
        data, picture = self._run_dir / "held_out.json", self._run_dir / "held_out.png"
        write_json(data, {name: values.tolist() for name, values in pl_module.measured.items()})
        draw(data, picture)
        for logger in trainer.loggers:
            if isinstance(logger, IterationWandbLogger):
                logger.log_image(key="held_out", images=[str(picture)])
