"""``python -m benchmarks.exact_optimum``: PPO against the exact optimum, for several beta and seeds.

Prints a Markdown table; exit code 1 where a run of PPO closes less than 95 % of the way from the reference to
the optimum. ``--advantage all`` runs the estimators without a critic beside it, on the same seeds and budget.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.exact_optimum.estimators import ESTIMATORS, comparison, settings_of
from benchmarks.exact_optimum.measure import Result, measure
from benchmarks.machine import run_main, write_json

LEAST_SHARE = 0.95
BETAS = (0.1, 0.3, 1.0)
SEEDS = (0, 1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pairs of beta and seed; returns the exit code."""
    options = parse(arguments)
    runs = list(itertools.product(options.advantage, options.betas, options.seeds))
    clock = Clock(len(runs))
    results = []
    for name, beta, seed in runs:
        clock.name = f"{name} beta {beta:g} seed {seed}"
        overrides = settings_of(name) | dict(options.set)
        results.append(measure(beta, seed, advantage=name, overrides=overrides, tell=clock.iteration))
        clock.run_done(results[-1])
    print(table(results) if options.advantage == ("gae",) else comparison(results))
    write_json(options.out, as_json(results, dict(options.set)))
    return 0 if all(r.figures.share >= LEAST_SHARE for r in results if r.advantage == "gae") else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exact_optimum",
        description="PPO on a task small enough to enumerate, against the best that any method can do.",
    )
    parser.add_argument(
        "--betas", type=_numbers(float), default=BETAS, help="weights of the KL, as 0.1,0.3,1"
    )
    parser.add_argument(
        "--advantage", type=_estimators, default=("gae",), help=f"all, or some of {','.join(ESTIMATORS)}"
    )
    parser.add_argument("--seeds", type=_numbers(int), default=SEEDS, help="as 0,1,2")
    parser.add_argument("--quick", action="store_true", help="one run: beta 1, seed 0")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a config key, as ppo.lam=1",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.betas, options.seeds = (1.0,), (0,)
    return options


def parse_setting(text: str) -> tuple[str, Any]:
    """``ppo.lr=1e-3`` as a dotted key and a value.

    Raises:
        ValueError: there is no ``=`` in it.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"must be KEY=VALUE, got {text!r}")
    try:
        return key, int(value) if value.lstrip("+-").isdigit() else float(value)  # YAML takes 1e-3 for text
    except ValueError:
        return key, yaml.safe_load(value)


def _setting(text: str) -> tuple[str, Any]:
    try:
        return parse_setting(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _estimators(text: str) -> tuple[str, ...]:
    names = ESTIMATORS if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in ESTIMATORS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ESTIMATORS)}")
    return names


def _numbers(kind: type) -> Any:
    def read(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(","))

    read.__name__ = f"list of {kind.__name__}"  # argparse shows it in its message
    return read


class Clock:
    """Progress on stderr: what runs, how far it is, when all of it will be done."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.done = 0
        self.name = ""
        self.started = time.perf_counter()
        self.live = sys.stderr.isatty()

    def iteration(self, done: int, total: int) -> None:
        if self.live:
            passed = self.done + done / total
            left = (time.perf_counter() - self.started) * (self.runs / passed - 1)
            line = f"[{self.done + 1}/{self.runs}] {self.name}: iteration {done}/{total}, {left:.0f} s left"
            print(f"\r{line:<75}", end="", file=sys.stderr, flush=True)

    def run_done(self, result: Result) -> None:
        self.done += 1
        left = (time.perf_counter() - self.started) * (self.runs / self.done - 1)
        line = (
            f"[{self.done}/{self.runs}] {self.name}: {result.figures.share:.1%} of the way, {left:.0f} s left"
        )
        print(f"{chr(13) if self.live else ''}{line:<75}", file=sys.stderr, flush=True)


def table(results: Sequence[Result]) -> str:
    """The figures as Markdown."""
    lines = [
        "| beta | seed | J_ref | J of PPO | J* | share of J* - J_ref | KL | KL of the optimum | s | CPU s |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        f = result.figures
        lines.append(
            f"| {result.beta:g} | {result.seed} | {f.j_reference:.4f} | {f.j_policy:.4f} | {f.j_optimum:.4f} "
            f"| {100 * f.share:.1f} % | {f.kl:.3f} | {f.kl_optimum:.3f} "
            f"| {result.seconds:.0f} | {result.cpu_seconds:.0f} |"
        )
    return "\n".join(lines)


def as_json(results: Sequence[Result], overrides: dict[str, Any]) -> dict[str, Any]:
    """All figures, for a plot or a later comparison."""
    runs = [
        {
            "advantage": r.advantage,
            "beta": r.beta,
            "seed": r.seed,
            "share": r.figures.share,
            "seconds": r.seconds,
            "cpu_seconds": r.cpu_seconds,
        }
        | asdict(r.figures)
        for r in results
    ]
    return {"least_share": LEAST_SHARE, "overrides": overrides, "runs": runs}


if __name__ == "__main__":
    run_main(main)
