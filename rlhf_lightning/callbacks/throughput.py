"""Tokens per second and peak memory of each iteration.

Adds ``throughput/tokens_per_s`` and ``memory/peak_gb`` to ``module.metrics`` at the end of the iteration, so
it comes before every callback that reads them (``build_callbacks`` keeps that order).
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import iterating

GIB = 2**30


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak, so that a sweep's job does not report the job before it.

    On a CPU the kernel's high-water mark is reset, which Linux alone offers; elsewhere it is the process's
    own.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> float:
    """Highest memory since the reset, GiB: allocated on the GPU, or resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / GIB
    import resource  # no such module on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class Throughput(Callback):
    """Tokens sampled or learned from, over the iteration's wall time; the highest memory of any rank."""

    def __init__(self) -> None:
        self._started = 0.0
        self._before = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reset_peak_memory(pl_module.device)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = time.perf_counter()
        self._before = iterating(pl_module).counters["tokens"]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = iterating(pl_module)
        metrics, tokens = module.metrics, module.counters["tokens"] - self._before
        metrics["throughput/tokens_per_s"] = tokens / (time.perf_counter() - self._started)
        peak = torch.tensor(peak_memory(pl_module.device), device=pl_module.device)
        metrics["memory/peak_gb"] = float(trainer.strategy.reduce(peak, reduce_op="max"))
