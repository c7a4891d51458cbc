"""Ctrl-C and SIGTERM: the run stops where it can be continued exactly, and says so."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import Phase, iterating
from rlhf_lightning.errors import Signalled

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HEARD = "\nStopping after this optimizer step, with everything saved; Ctrl-C again stops at once.\n"


class Interrupt(Callback):
    """Hears the signals during the fit, and stops the module when it next asks by ``pause``.

    Behind ``Checkpoints``: while that saves what was stopped, the signals still come here.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._trainer: Trainer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        iterating(pl_module).pause = self.pause
        # After Lightning's own handlers, which this replaces: its SIGTERM would cut an iteration off unsaved.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def pause(self, phase: Phase) -> None:
        """Raise ``Signalled`` where a signal has come.

        Ranks are at different tokens of a rollout; they agree between optimizer steps alone.
        """
        assert self._trainer is not None
        if self._trainer.world_size > 1:
            if phase != "update":
                return
            heard = torch.tensor(self._asked or 0, device=self._trainer.strategy.root_device)
            self._asked = int(self._trainer.strategy.reduce(heard, reduce_op="max")) or None
        if self._asked is not None:
            raise Signalled(self._asked)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked is None:
            os.write(2, _HEARD.encode())  # print could meet a lock that the interrupted code holds
        self._asked = number

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
