"""Watches each PPO iteration, and warns or ends the run where a figure is past its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.text import Text

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.watches import (
    FROM_START,
    Trip,
    judge_held_out,
    judge_rollout,
    judge_second,
    sentence,
)
from rlhf_lightning.config.guard import GuardConfig
from rlhf_lightning.config.rewards import CombinedRewardConfig, RewardConfig
from rlhf_lightning.console import make_console


class Guard(Callback):
    """Keeps the figures of the first iterations, judges, speaks; comes behind EvaluationCallback.

    A warning is said once, and again only after its figure was back within the limit. To end the run it sets
    ``trainer.should_stop``: the callbacks behind it, and EvaluationCallback where a figure of the rollout was
    the reason, then take the iteration for the last one, and Checkpoints saves it. In the last iteration of
    all, a stop is a warning.

    Attributes:
        stopped: why the run ends early, None where it does not.
        warnings: ``iteration, watch, figure, value, limit, text`` of each warning of the whole run.
    """

    def __init__(self, guard: GuardConfig, *, watched: Sequence[str]) -> None:
        """``watched``: names of the reward's parts that do not train."""
        self.guard = guard
        self.watched = list(watched)
        self.stopped: str | None = None
        self.warnings: list[dict[str, Any]] = []
        self._first: dict[str, list[float]] = {figure: [] for figure in FROM_START}
        self._scores: list[float] = []
        self._seconds: dict[str, list[float]] = {f"reward/{part}": [] for part in watched}
        self._said: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "warnings": [dict(warning) for warning in self.warnings],
            "first": {figure: list(values) for figure, values in self._first.items()},
            "scores": list(self._scores),
            "seconds": {figure: list(values) for figure, values in self._seconds.items()},
            "said": list(self._said),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.warnings = state_dict["warnings"]
        self._first = state_dict["first"]
        self._scores = state_dict["scores"]
        self._seconds = state_dict["seconds"]
        self._said = state_dict["said"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = iterating(pl_module).metrics
        for figure, values in self._first.items():
            if figure in metrics and len(values) < self.guard.window:
                values.append(float(metrics[figure]))
        if self._seconds and all(figure in metrics for figure in ("objective/score", *self._seconds)):
            self._scores.append(float(metrics["objective/score"]))
            for figure, values in self._seconds.items():
                values.append(float(metrics[figure]))
        trips = judge_rollout(metrics, self._first, self.guard)
        trips += judge_second(self._scores, self._seconds, self.guard)
        self._act(trainer, pl_module, trips, held_out=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = iterating(pl_module).metrics
        if "eval/win_rate" not in metrics:
            return
        trips = judge_held_out(metrics, self.watched, self.guard)
        self._act(trainer, pl_module, trips, held_out=True)

    def _act(
        self, trainer: Trainer, pl_module: LightningModule, trips: list[Trip], *, held_out: bool
    ) -> None:
        trips = trainer.strategy.broadcast(trips)  # all ranks end together, or none
        past = {trip.figure for trip in trips}
        self._said = [one for one in self._said if one in past or one.startswith("eval/") != held_out]
        iteration = trainer.current_epoch
        last = iteration + 1 >= iterating(pl_module).total_iterations
        if trips and self.guard.action == "stop" and not last and self.stopped is None:
            self.stopped = sentence(trips[0], iteration=iteration)
            trainer.should_stop = True
            return
        for trip in trips:
            if trip.figure in self._said:
                continue
            self._said.append(trip.figure)
            text = sentence(trip, iteration=iteration)
            fields = {"watch": trip.watch, "figure": trip.figure, "value": trip.value, "limit": trip.limit}
            self.warnings.append({"iteration": iteration, **fields, "text": text})
            if trainer.is_global_zero:
                make_console(stderr=True).print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


def watched_parts(reward: RewardConfig) -> list[str]:
    """Parts of a combined reward that do not train: their weight is 0."""
    if not isinstance(reward, CombinedRewardConfig):
        return []
    return [name for name, part in reward.parts.items() if part.weight == 0]
