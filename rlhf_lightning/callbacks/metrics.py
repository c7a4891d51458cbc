"""One row of figures for each iteration, the same one for the run's files and for the trackers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.table import Table
from rlhf_lightning.tracking import IterationWandbLogger

COUNTERS = ("iteration", "optimizer_steps", "responses", "tokens")
COSTS = ("time", "throughput", "memory")
"""Families of figures that differ each time: the machine's, not the run's."""


class Metrics(Callback):
    """Writes metrics.csv and timings.csv and sends both as one row to every logger, the iteration as axis.

    metrics.csv has the figures that a run repeated on the same machine repeats to the last bit; what it cost
    is in timings.csv. A resumed run first drops the rows that it is about to repeat.
    """

    def __init__(self, run_dir: Path, *, resume_from: int = 0) -> None:
        """``resume_from``: the first iteration of this process."""
        self.row: dict[str, float] = {}  # the last one
        self._next = resume_from
        self._figures = Table(run_dir / "metrics.csv", first=COUNTERS)
        self._costs = Table(run_dir / "timings.csv", first=COUNTERS)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            earlier = list(_joined(self._figures.cut(self._next), self._costs.cut(self._next)))
            self.row = earlier[-1] if earlier else {}
            for logger in trainer.loggers:
                if isinstance(logger, IterationWandbLogger):
                    logger.catch_up(earlier)

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
            costs = {name for name in metrics if name.partition("/")[0] in COSTS}
            self._figures.append({name: value for name, value in self.row.items() if name not in costs})
            self._costs.append({"iteration": iteration} | {name: metrics[name] for name in costs})
            for logger in trainer.loggers:
                logger.log_metrics(self.row, step=iteration)


def _joined(figures: list[dict[str, str]], costs: list[dict[str, str]]) -> Iterator[dict[str, float]]:
    """Rows of both files by iteration, as they were logged."""
    by_iteration = {row["iteration"]: row for row in costs}
    for row in figures:
        whole = row | by_iteration.get(row["iteration"], {})
        yield {k: int(v) if k in COUNTERS else float(v) for k, v in whole.items() if v}
