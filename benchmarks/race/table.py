"""From the runs of both sides to medians and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import markdown, middle


@dataclass(frozen=True)
class Run:
    """One process."""

    system: str
    dtype: str
    turn: int
    """Round in which it ran: ratios are taken within a round."""
    seconds: float
    """Median over its iterations."""
    cpu_seconds: float
    """The same of processor time, all threads."""
    peak_gb: float
    phases: dict[str, float]
    """Median seconds by phase; empty for the peer."""
    prompt_tokens: int
    iterations: list[float]
    """Seconds of every iteration, warm-up included."""

    @classmethod
    def of(cls, system: str, dtype: str, turn: int, found: Mapping[str, Any], *, skip: int) -> Run:
        """From what a process printed; the first ``skip`` iterations do not count."""
        phases = {name: middle(times[skip:]) for name, times in found.get("phases", {}).items()}
        seconds = list(found["seconds"])
        tokens = found.get("prompt_tokens", 0)
        cpu = middle(found["cpu_seconds"][skip:])
        return cls(
            system, dtype, turn, middle(seconds[skip:]), cpu, found["peak_gb"], phases, tokens, seconds
        )


def sides(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(dtype, system) in the order of their first run."""
    return list(dict.fromkeys((run.dtype, run.system) for run in runs))


def race_table(runs: Sequence[Run], *, peer: str) -> str:
    """Seconds and memory of every side, and its ratios to the peer in the same dtype and round."""
    rows = []
    for dtype, system in sorted(sides(runs), key=lambda side: (side[0], side[1] != peer)):
        own = [run for run in runs if (run.dtype, run.system) == (dtype, system)]
        theirs = {run.turn: run for run in runs if (run.dtype, run.system) == (dtype, peer)}
        met = [(run, theirs[run.turn]) for run in own if run.turn in theirs and system != peer]
        times = [run.seconds for run in own]
        rows.append(
            [
                f"{dtype}, {system}",
                f"{middle(times):.1f}",
                f"{min(times):.1f} to {max(times):.1f}",
                f"{middle([b.seconds / a.seconds for a, b in met]):.2f}" if met else "",
                f"{middle([run.cpu_seconds for run in own]):.1f}",
                f"{middle([b.cpu_seconds / a.cpu_seconds for a, b in met]):.2f}" if met else "",
                f"{middle([run.peak_gb for run in own]):.2f}",
                f"{middle([a.peak_gb / b.peak_gb for a, b in met]):.2f}" if met else "",
            ]
        )
    head = [
        "",
        "s an iteration",
        "over the repeats",
        "times as fast",
        "CPU s",
        "times less",
        "peak GB",
        "of the peer's",
    ]
    return markdown(head, rows)


def floor_table(
    runs: Sequence[Run], floors: Mapping[tuple[str, str], Mapping[str, float]], phases: Sequence[str]
) -> str:
    """Measured seconds of each phase beside its floor: ``floors[system, dtype][phase]``."""
    rows = []
    for dtype, system in sides(runs):
        own = [run for run in runs if (run.dtype, run.system) == (dtype, system)]
        cells = []
        for phase in phases:
            measured, least = middle([run.phases[phase] for run in own]), floors[system, dtype][phase]
            cells.append(f"{measured:.1f} / {least:.1f} = {measured / least:.1f}")
        rows.append([f"{dtype}, {system}", *cells])
    return markdown(["seconds / floor", *phases], rows)
