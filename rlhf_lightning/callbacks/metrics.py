"""One row of figures for each iteration, the same one for metrics.csv and for the trackers."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.files import complete_lines, write_text

COUNTERS = ("iteration", "optimizer_steps", "responses", "tokens")


class Metrics(Callback):
    """Writes metrics.csv and sends the same row to every logger, with the iteration as their axis.

    Columns: the four counters, then the metric names in order. A name that appears later widens the file (the
    older rows stay empty there) rather than ending the run. A resumed run first drops the rows that it is
    about to repeat.
    """

    def __init__(self, path: Path, *, resume_from: int = 0) -> None:
        """``resume_from``: the first iteration of this process."""
        self.path = path
        self.row: dict[str, float] = {}  # the last one
        self._next = resume_from
        self._columns: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            rows = [row for row in self._read() if int(row["iteration"]) < self._next]
            self._columns = list(rows[0]) if rows else []
            if rows or self.path.exists():
                self._rewrite(rows)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        iteration = trainer.current_epoch
        if iteration != self._next:
            raise RuntimeError(f"iteration {iteration} came where {self._next} was due: rows would not join")
        self._next = iteration + 1
        module = iterating(pl_module)
        counters: dict[str, float] = {name: module.counters[name] for name in COUNTERS[1:]}
        metrics = {name: float(value) for name, value in module.metrics.items()}
        self.row = {"iteration": iteration} | counters | metrics
        if trainer.is_global_zero:
            self._append(self.row)
            for logger in trainer.loggers:
                logger.log_metrics(self.row, step=iteration)

    def _append(self, row: dict[str, float]) -> None:
        new = sorted(set(row) - set(self._columns) - set(COUNTERS))
        if new:
            rows = self._read()
            names = sorted({*self._columns, *new} - set(COUNTERS))
            self._columns = [*COUNTERS, *names]
            self._rewrite(rows)
        # Opened for each row: nothing is left in a buffer when the process is killed.
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._text([row]))

    def _read(self) -> list[dict[str, str]]:
        return list(csv.DictReader(complete_lines(self.path)))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        header = ",".join(self._columns) + "\n" if self._columns else ""
        write_text(self.path, header + self._text(rows))

    def _text(self, rows: list[Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()
