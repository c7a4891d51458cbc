"""last.ckpt, best.ckpt and the adapters, each put in place whole.

Lightning's ModelCheckpoint is not used: it removes the old file before or after writing the new one in place,
so a kill at the wrong moment leaves a torn ``last.ckpt``; it also counts in optimizer steps.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.files import full, publish
from rlhf_lightning.console import make_console
from rlhf_lightning.errors import Signalled, UserError

_SLACK = 2**20  # counters, settings, a cut iteration's experience


class Checkpoints(Callback):
    """Saves every ``every`` iterations and at the end; keeps the best by the plain value of ``objective``.

    Every iteration that measures the objective is judged, and a new best is saved at once. The value is one
    measurement, so "best" carries its noise. It comes after all that have state: what they changed is in the
    file.
    """

    def __init__(
        self, run_dir: Path, *, objective: tuple[str, int], every: int, resume_from: int = 0
    ) -> None:
        """``objective``: the metric's name, and 1 where more is better, -1 where less is; ``resume_from``:
        the first iteration of this process."""
        self.folder = run_dir / "checkpoints"
        self.adapters = run_dir / "adapters"
        self._objective, self._sign = objective
        self._every = every
        self._best_value: float | None = None
        self._best_iteration: int | None = None
        self._saved_iteration = resume_from - 1

    @property
    def last(self) -> Path:
        return self.folder / "last.ckpt"

    @property
    def best(self) -> Path:
        return self.folder / "best.ckpt"

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self._best_value, "best_iteration": self._best_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best_value = state_dict["best_value"]
        self._best_iteration = state_dict["best_iteration"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, iteration = iterating(pl_module), trainer.current_epoch
        ends = iteration + 1 >= module.total_iterations or trainer.should_stop
        improved = self._judge(module.metrics, iteration, ends)
        due = ends or (iteration + 1) % self._every == 0
        names = [path for path, wanted in ((self.best, improved), (self.last, due)) if wanted]
        if not names:
            return
        try:
            self._save(trainer, pl_module, names)
        except OSError as error:
            if ends or not full(error):
                raise
            self._warn(f"iteration {iteration} is not saved: {full(error)}; the run goes on")
            return
        if due:
            self._saved_iteration = iteration

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Signalled):
            self._save(trainer, pl_module, [self.last])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0 or self._saved_iteration < 0 or not self.last.exists():
            raise RuntimeError(
                f"training ended without a checkpoint in {self.folder}: {trainer.global_step} steps "
                f"were counted and the last saved iteration is {self._saved_iteration}"
            )

    def _judge(self, metrics: dict[str, float], iteration: int, ends: bool) -> bool:
        if self._objective not in metrics:
            if self._objective.startswith("eval/") and not ends:
                return False  # held-out rows are not looked at in every iteration
            near = difflib.get_close_matches(self._objective, metrics, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(metrics))}"
            raise UserError(f"objective={self._objective} is no metric of this run{hint}")
        value = float(metrics[self._objective])
        if math.isnan(value):
            return False
        if self._best_value is not None and self._sign * (value - self._best_value) <= 0:
            return False
        self._best_value, self._best_iteration = value, iteration
        return True

    def _save(self, trainer: Trainer, pl_module: LightningModule, names: list[Path]) -> None:
        """Write one checkpoint and give it each of these names; the adapters with ``last``.

        Raises:
            OSError: the disk is full, or is about to be; what was there before is whole.
        """
        temporary = self.folder / ".writing.tmp"
        try:
            room = trainer.strategy.broadcast(shutil.disk_usage(self.folder).free)
            if room < (needed := self._size(pl_module)):
                text = f"{self.folder} has {room / 2**20:.0f} MiB left, a checkpoint may take "
                raise OSError(errno.ENOSPC, f"{text}{needed / 2**20:.0f} MiB")
            trainer.save_checkpoint(temporary, weights_only=False)  # on every rank; rank zero writes
            if trainer.is_global_zero:
                for path in names[:-1]:
                    self._link(temporary, path)
                publish(temporary, names[-1])
            if self.last in names:
                self._save_adapters(trainer, pl_module)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @staticmethod
    def _size(pl_module: LightningModule) -> int:
        """Bytes that a checkpoint and the adapters beside it may take: weights twice, AdamW's two moments."""
        learning = sum(p.numel() * p.element_size() for p in pl_module.parameters() if p.requires_grad)
        return 4 * learning + _SLACK

    @staticmethod
    def _warn(text: str) -> None:
        make_console(stderr=True).print(text, style="yellow", markup=False, soft_wrap=True)

    @staticmethod
    def _link(source: Path, final: Path) -> None:
        """Give one written file a second name; where the file system has no links, a copy."""
        temporary = final.with_name(f".{final.name}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        publish(temporary, final)

    def _save_adapters(self, trainer: Trainer, pl_module: LightningModule) -> None:
        temporary, old = self.adapters.with_name(".adapters.tmp"), self.adapters.with_name(".adapters.old")
        if trainer.is_global_zero:
            for folder in (temporary, old):
                shutil.rmtree(folder, ignore_errors=True)
            temporary.mkdir(parents=True)
        trainer.strategy.barrier("adapters")
        iterating(pl_module).save_adapters(temporary)
        trainer.strategy.barrier("adapters written")
        if trainer.is_global_zero:
            # A folder cannot be replaced in one step; the old one stays until the new one has its name.
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.adapters, old)
            os.rename(temporary, self.adapters)
            shutil.rmtree(old, ignore_errors=True)
