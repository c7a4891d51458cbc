"""Draws the learning curves of finished runs: `python -m scripts.plot_runs OUT.png RUN [RUN ...]`."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = [
    ("objective/score", "score of the reward"),
    ("reward/gold", "gold rule, never trained on"),
    ("objective/kl", "KL to the reference, nats a response"),
    ("rollout/length_mean", "tokens a response"),
]


def read(run: Path) -> dict[str, list[float]]:
    """Columns of a run's metrics.csv."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if rows[0][name] != ""}


def draw(out: Path, runs: list[Path], *, labels: list[str]) -> None:
    columns = [read(run) for run in runs]
    panels = [(name, title) for name, title in PANELS if all(name in c for c in columns)]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 2.8), layout="constrained")
    for axis, (name, title) in zip(axes, panels, strict=True):
        for column, label in zip(columns, labels, strict=True):
            axis.plot(column["iteration"], column[name], linewidth=1.6, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("iteration", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--labels", nargs="*")
    arguments = parser.parse_args()
    draw(arguments.out, arguments.runs, labels=arguments.labels or [run.name for run in arguments.runs])
