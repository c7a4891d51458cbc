"""The guard's judgement: which figures of an iteration are past their limit, and what cures that usually."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_lightning.config.guard import GuardConfig
from rlhf_lightning.functional.watches import parting, start_of

FROM_START = ("objective/entropy", "rollout/length_mean", "rollout/eos_rate")
"""Figures whose first iterations have to be known."""

CURES = {
    "kl": "raise ppo.beta, set ppo.kl_target, or lower ppo.lr",
    "ratio": "lower ppo.lr or ppo.epochs, or set ppo.target_kl",
    "entropy": "raise ppo.entropy_coef or ppo.beta, or lower ppo.lr",
    "length": "raise ppo.beta, set ppo.missing_eos_penalty, or take the length out of the reward",
    "unended": "set ppo.missing_eos_penalty, raise ppo.beta, or raise generation.max_new_tokens",
    "unique": "raise ppo.beta, ppo.entropy_coef or generation.temperature",
    "second": "raise ppo.beta, stop earlier (checkpoints/best.ckpt, objective=), or mend the reward",
}


class Trip(NamedTuple):
    """A figure past its limit."""

    watch: str  # the key below guard.
    figure: str
    value: float
    limit: float  # in the figure's own unit
    meaning: str  # how the limit came about


def judge_rollout(
    metrics: Mapping[str, float], first: Mapping[str, Sequence[float]], guard: GuardConfig
) -> list[Trip]:
    """What of one iteration is past its limit. A figure that was not measured, or is NaN, is not.

    Args:
        metrics: of the iteration.
        first: each of FROM_START in the run's iterations up to and with this one, as many as there are kept.
    """
    trips = []
    for name, figure, limit in (
        ("kl", "objective/kl", guard.kl),
        ("ratio", "policy/ratio_max", guard.ratio),
        ("unique", "rollout/unique_fraction", guard.unique),
    ):
        value = metrics.get(figure)
        if limit is None or value is None:
            continue
        if value < limit if name == "unique" else value > limit:
            trips.append(Trip(name, figure, value, limit, f"guard.{name}"))
    for name, figure, factor in (
        ("entropy", "objective/entropy", guard.entropy),
        ("length", "rollout/length_mean", guard.length),
    ):
        value, start = metrics.get(figure), start_of(first.get(figure, ()), guard.window)
        if factor is None or value is None or start is None:
            continue
        limit = factor * start
        if value < limit if name == "entropy" else value > limit:
            trips.append(Trip(name, figure, value, limit, f"guard.{name} times {start:.4g} at the start"))
    start, value = start_of(first.get("rollout/eos_rate", ()), guard.window), metrics.get("rollout/eos_rate")
    if guard.unended is not None and value is not None and start is not None:
        limit = 1 - guard.unended
        if value < limit < start:
            meaning = f"1 - guard.unended; {start:.4g} at the start"
            trips.append(Trip("unended", "rollout/eos_rate", value, limit, meaning))
    return trips


def judge_second(
    scores: Sequence[float], seconds: Mapping[str, Sequence[float]], guard: GuardConfig
) -> list[Trip]:
    """Rewards that are only watched and fall while the score rises.

    Args:
        scores: objective/score of every iteration so far.
        seconds: reward/PART of the same iterations, for each part that does not train.
    """
    if guard.second is None:
        return []
    trips = []
    for figure, values in seconds.items():
        found = parting(scores, values, window=guard.window)
        if found is not None and found.standard_errors > guard.second:
            value = sum(values[-guard.window :]) / guard.window
            allowed = value + found.fall * (1 - guard.second / found.standard_errors)
            meaning = f"its best less guard.second={guard.second:g} standard errors, while the score rose"
            trips.append(Trip("second", figure, value, allowed, meaning))
    return trips


def judge_held_out(metrics: Mapping[str, float], parts: Sequence[str], guard: GuardConfig) -> list[Trip]:
    """Held-out answers that beat the reference by the score and lose to it by another reward, both for sure.

    Args:
        parts: names of the rewards that do not train.
    """
    low = metrics.get("eval/win_rate_low")
    if guard.second is None or low is None or not low > 0.5:
        return []
    figures = [f"eval/{part}_win_rate_high" for part in parts]
    meaning = f"the interval of a win rate, while eval/win_rate_low is {low:.4g}"
    return [
        Trip("second", figure, metrics[figure], 0.5, meaning)
        for figure in figures
        if metrics.get(figure, 1.0) < 0.5
    ]


def sentence(trip: Trip, *, iteration: int) -> str:
    """Figure, value, limit and cures for a person; ``iteration`` counts from 0."""
    side = "above" if trip.value > trip.limit else "below"
    return (
        f"iteration {iteration + 1}: {trip.figure} is {trip.value:.4g}, {side} the limit {trip.limit:.4g} "
        f"({trip.meaning}); usual cures: {CURES[trip.watch]}; guard.{trip.watch}=null stops watching"
    )
