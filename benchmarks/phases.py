"""Peak memory of each phase of a PPO iteration."""

from __future__ import annotations

import torch

from rlhf_lightning.callbacks.throughput import GIB, peak_memory, reset_peak_memory
from rlhf_lightning.stages.ppo import PPO


class PhasePeaks:
    """Reads and resets the high-water mark at every sign of progress, and keeps the highest by phase, GB.

    On a GPU the mark is of allocated memory, on a CPU of resident memory (its reset is Linux's).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """What was reached since the last mark belongs to ``phase``."""
        peak = peak_memory(self.device) * GIB / 1e9
        self.peaks[phase] = max(peak, self.peaks.get(phase, 0.0))
        reset_peak_memory(self.device)

    def watch(self, stage: PPO) -> None:
        """Loading ends here; from now on the stage's own signs of progress set the marks."""
        self.mark("load")
        stage.progress = lambda phase, done, total: self.mark(phase)

    @property
    def highest(self) -> float:
        return max(self.peaks.values())
