"""The picture of a reward model: is it right, is it as sure as it should be, and does it count words?"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rlhf_lightning.functional.calibration import correlation, reliability, wilson_interval

CHOSEN, REJECTED, INK = "#0072b2", "#e69f00", "#444444"  # Okabe and Ito's blue and orange, also apart in grey
Pairs = dict[str, Tensor]


def draw(data: Path, picture: Path) -> None:
    """Draw ``held_out.json``: scores and lengths (tokens) of both answers, one pair an entry."""
    read = json.loads(data.read_text(encoding="utf-8"))
    pairs: Pairs = {name: torch.tensor(values, dtype=torch.float64) for name, values in read.items()}
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _calibration(axes[0, 0], pairs)
    _scores(axes[0, 1], pairs)
    _length(axes[1, 0], pairs)
    _by_length(axes[1, 1], pairs)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    right = (pairs["chosen"] > pairs["rejected"]).double().sum().item()
    count = len(pairs["chosen"])
    low, high = wilson_interval(right, count)
    figure.suptitle(
        f"{count} held-out pairs: accuracy {right / count:.3f} (95 % interval {low:.3f} to {high:.3f})"
    )
    figure.savefig(picture, dpi=110)


def _calibration(axis: Axes, pairs: Pairs) -> None:
    found = reliability(pairs["chosen"], pairs["rejected"])
    some = found.pairs > 0
    axis.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, linestyle="--", label="as sure as it is right")
    axis.plot(found.confidence[some], found.accuracy[some], marker="o", color=CHOSEN)
    for x, y, n in zip(found.confidence[some], found.accuracy[some], found.pairs[some], strict=True):
        axis.annotate(f"{n}", (float(x), float(y)), textcoords="offset points", xytext=(4, -12), fontsize=8)
    axis.set(
        title=f"Calibration: expected error {found.error:.3f}",
        xlabel="confidence of the model",
        ylabel="share it orders right (number of pairs)",
    )
    axis.legend(frameon=False)


def _scores(axis: Axes, pairs: Pairs) -> None:
    both = torch.cat([pairs["chosen"], pairs["rejected"]])
    edges = torch.linspace(float(both.min()), float(both.max()) + 1e-9, 31).tolist()
    axis.hist(pairs["rejected"].tolist(), bins=edges, color=REJECTED, alpha=0.7, label="rejected")
    axis.hist(
        pairs["chosen"].tolist(), bins=edges, color=CHOSEN, histtype="step", linewidth=2, label="chosen"
    )
    axis.set(title="Scores", xlabel="score (held-out chosen answers average 0)", ylabel="answers")
    axis.legend(frameon=False)


def _length(axis: Axes, pairs: Pairs) -> None:
    for side, colour, mark in (("rejected", REJECTED, "x"), ("chosen", CHOSEN, ".")):
        axis.scatter(
            pairs[f"{side}_length"], pairs[side], color=colour, marker=mark, s=22, alpha=0.7, label=side
        )
    scores = torch.cat([pairs["chosen"], pairs["rejected"]])
    lengths = torch.cat([pairs["chosen_length"], pairs["rejected_length"]])
    axis.set(
        title=f"Score and length: correlation {correlation(scores, lengths):+.2f}",
        xlabel="tokens of the answer that the pair does not share",
        ylabel="score",
    )
    axis.legend(frameon=False)


def _by_length(axis: Axes, pairs: Pairs) -> None:
    longer = pairs["chosen_length"] - pairs["rejected_length"]
    right = 0.5 * (1 + (pairs["chosen"] - pairs["rejected"]).sign())
    groups = {"chosen is shorter": longer < 0, "equal": longer == 0, "chosen is longer": longer > 0}
    shown = {name: mask for name, mask in groups.items() if bool(mask.any())}
    heights = [float(right[mask].mean()) for mask in shown.values()]
    bars = axis.bar(list(shown), heights, color=CHOSEN, width=0.6)
    axis.bar_label(
        bars, labels=[f"{h:.2f} ({int(m.sum())})" for h, m in zip(heights, shown.values(), strict=True)]
    )
    axis.axhline(0.5, color=INK, linewidth=1, linestyle="--")
    axis.set(title="Accuracy by length", ylabel="share it orders right (number of pairs)", ylim=(0, 1.1))
