"""summary.json: how the run ended, its last and best figures, what it cost, and with which versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import time
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

import rlhf_lightning
from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.files import write_json
from rlhf_lightning.callbacks.guard import Guard
from rlhf_lightning.callbacks.metrics import COUNTERS, Metrics
from rlhf_lightning.errors import Signalled, Stopped, UserError

Status = Literal["finished", "stopped", "failed", "interrupted"]
_LIBRARIES = ("torch", "lightning", "transformers", "peft", "bitsandbytes")


def versions() -> dict[str, str | None]:
    """Versions of Python, this package and the libraries that decide the numbers; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found | {"rlhf_lightning": rlhf_lightning.__version__}


def write_failure(run_dir: Path, error: BaseException) -> None:
    """Record in summary.json that the run ended by ``error``, beside whatever figures it already has.

    For failures outside the fit, where no callback hears of them: a model that does not load, a report that
    breaks.
    """
    path = run_dir / "summary.json"
    with contextlib.suppress(OSError):  # a full disk, maybe: it must not hide what went wrong first
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"versions": versions()}
        write_json(path, known | _ending(error))


def _ending(error: BaseException) -> dict[str, Any]:
    stopped = isinstance(error, KeyboardInterrupt | Signalled | SystemExit)
    status: Status = "interrupted" if stopped else "failed"
    if isinstance(error, Stopped):
        status = "stopped"
    text = str(error).strip()
    if not isinstance(error, UserError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return {"status": status, "error": text}


class Summary(Callback):
    """Writes summary.json when the fit ends, well or badly; comes after ``Metrics``, whose rows it reads.

    A run that was killed after its last checkpoint has nothing left to train, and Lightning then skips
    ``on_train_start`` and ``on_train_end``: what belongs to the end of a run hears ``on_fit_end``.
    """

    def __init__(
        self, path: Path, *, metrics: Metrics, objective: tuple[str, int], guard: Guard | None = None
    ) -> None:
        self.path = path
        self._guard = guard
        self._metrics = metrics
        self._objective, self._sign = objective
        self._best: dict[str, float] = {}
        self._wall_s = 0.0  # of the parts before a resume
        self._sampling: dict[str, float] = {"tokens": 0.0, "seconds": 0.0}
        self._peak_gb = 0.0
        self._started = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": dict(self._best),
            "wall_s": self._wall(),
            "sampling": dict(self._sampling),
            "peak_gb": self._peak_gb,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = dict(state_dict["best"])
        self._wall_s = state_dict["wall_s"]
        self._sampling = dict(state_dict["sampling"])
        self._peak_gb = state_dict["peak_gb"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()
        if trainer.is_global_zero:
            # Else a run killed without a word would show how its life before ended.
            self.path.unlink(missing_ok=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        row = self._metrics.row
        value = self._sign * row.get(self._objective, float("nan"))
        if value > self._sign * self._best.get(self._objective, -self._sign * float("inf")):
            self._best = dict(row)
        tokens = row["tokens"] - self._sampling["tokens"]
        self._sampling["tokens"] = row["tokens"]
        self._sampling["seconds"] += tokens / max(row["throughput/tokens_per_s"], 1e-9)
        self._peak_gb = max(self._peak_gb, row["memory/peak_gb"])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stopped = self._guard and self._guard.stopped
        finished = {"status": "finished", "error": None}
        self._write(trainer, pl_module, _ending(Stopped(stopped)) if stopped else finished)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer, pl_module, _ending(exception))

    def _wall(self) -> float:
        return self._wall_s + time.perf_counter() - self._started

    def _write(self, trainer: Trainer, pl_module: LightningModule, ending: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        row, seconds = self._metrics.row, self._sampling["seconds"]
        write_json(
            self.path,
            {
                **ending,
                "warnings": self._guard.warnings if self._guard else [],
                "objective": self._objective,
                "iterations": int(row["iteration"]) + 1 if row else 0,
                "total_iterations": iterating(pl_module).total_iterations,
                "counters": {name: row[name] for name in COUNTERS[1:] if name in row},
                "last": row,
                "best": self._best,
                "wall_s": self._wall(),
                "peak_memory_gb": self._peak_gb,
                "tokens_per_s": self._sampling["tokens"] / seconds if seconds else 0.0,
                "versions": versions(),
            },
        )
