"""Running mean and deviation of the scores, for rewards on a scale of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RunningMoments:
    """Mean and population variance of everything seen so far.

        δ = μ_b − μ,   n' = n + n_b,   μ' = μ + δ n_b / n',   M2' = M2 + M2_b + δ² n n_b / n'

    Chan, Golub and LeVeque 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    Give every rank the scores of all ranks, and the statistics agree everywhere.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0  # M2, the sum of squared distances from the mean

    @property
    def std(self) -> float:
        """Population deviation; 0 before two values were seen."""
        return math.sqrt(self.squares / self.count) if self.count > 1 else 0.0

    def update(self, x: Tensor) -> None:
        """Take in a batch of values, any shape; an empty one changes nothing.

        Raises:
            ValueError: a value is NaN or infinite, which would poison the statistics for good.
        """
        batch = x.detach().double().flatten()
        bad = (~batch.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"values must be finite; row {bad[0]} is {batch[bad[0]].item()}")
        size = batch.numel()
        if size == 0:
            return
        batch_mean = batch.mean().item()
        delta = batch_mean - self.mean
        total = self.count + size
        self.squares += (batch - batch_mean).square().sum().item() + delta**2 * self.count * size / total
        self.mean += delta * size / total
        self.count = total

    def normalize(self, x: Tensor) -> Tensor:
        """(x − μ) / σ, the shape of ``x``, at least float32; x − μ while the values seen have no spread."""
        smallest = max(1e-6, 1e-7 * abs(self.mean))
        scale = self.std if self.std > smallest else 1.0
        return ((x.double() - self.mean) / scale).to(
            torch.float64 if x.dtype == torch.float64 else torch.float32
        )

    def state_dict(self) -> dict[str, float]:
        """Plain numbers for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count = float(state["count"])
        self.mean = float(state["mean"])
        self.squares = float(state["squares"])
