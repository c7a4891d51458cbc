"""The picture of a reward model: is it right, is it as sure as it should be, and does it count words?"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rlhf_lightning.functional.calibration import correlation, ordered_right, reliability, wilson_interval

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
    right = ordered_right(pairs["chosen"], pairs["rejected"])
    low, high = wilson_interval(float(right.sum()), len(right))
    figure.suptitle(
        f"Held-out pairs: {100 * float(right.mean()):.1f} % of {len(right)} ordered right "
        f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    )
    figure.savefig(picture, dpi=110)


def _calibration(axis: Axes, pairs: Pairs) -> None:
    """Share ordered right by confidence, with 95 % intervals; grey bars are how many pairs a bin holds."""
    found = reliability(pairs["chosen"], pairs["rejected"])
    some = found.pairs > 0
    counts, x, y = found.pairs[some].tolist(), found.confidence[some].tolist(), found.accuracy[some].tolist()
    axis.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, linestyle="--", label="as sure as it is right")
    axis.errorbar(
        x, y, yerr=_whiskers(y, counts), marker="o", color=CHOSEN, capsize=3, elinewidth=1,
        label="this model, 95 % intervals",
    )  # fmt: skip
    axis.set(
        title=f"Calibration: expected error {found.error:.3f}",
        xlabel="confidence: probability of the answer it prefers",
        ylabel="share of pairs ordered right",
        xlim=(0.49, 1.01),
        ylim=(-0.03, 1.25),  # room for the legend
        yticks=[0, 0.2, 0.4, 0.6, 0.8, 1],
    )
    bins = len(found.pairs)
    behind = axis.twinx()
    behind.bar(
        [0.5 + (place + 0.5) / (2 * bins) for place in range(bins)],
        found.pairs.tolist(),
        width=0.45 / bins,
        color="#dddddd",
    )
    behind.set(ylabel="pairs (grey bars)", ylim=(0, 3 * max(counts)))
    behind.spines["top"].set_visible(False)
    axis.set_zorder(behind.get_zorder() + 1)
    axis.patch.set_visible(False)
    axis.legend(frameon=False, loc="upper left")


def _whiskers(shares: list[float], counts: list[int]) -> list[list[float]]:
    """How far the 95 % intervals of shares reach below them, and above."""
    ends = [wilson_interval(share * n, n) for share, n in zip(shares, counts, strict=True)]
    # Rounding may put an end on the wrong side of the share by 1e-17, which matplotlib refuses.
    below = [max(0.0, share - low) for share, (low, _) in zip(shares, ends, strict=True)]
    above = [max(0.0, high - share) for share, (_, high) in zip(shares, ends, strict=True)]
    return [below, above]


def _scores(axis: Axes, pairs: Pairs) -> None:
    both = torch.cat([pairs["chosen"], pairs["rejected"]])
    edges = torch.linspace(float(both.min()), float(both.max()), 31, dtype=torch.float64).tolist()
    if edges[0] == edges[-1]:
        edges = [edges[0] - 0.5, edges[0] + 0.5]
    axis.hist(
        pairs["rejected"].tolist(), bins=edges, color=REJECTED, alpha=0.7, hatch="///", edgecolor="white",
        label="rejected",
    )  # fmt: skip
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


def by_length(pairs: Pairs) -> dict[str, tuple[float, float, int]]:
    """Share ordered right, mean margin (chosen minus rejected score) and count, by which side is longer."""
    longer = pairs["chosen_length"] - pairs["rejected_length"]
    groups = {"chosen shorter": longer < 0, "equal length": longer == 0, "chosen longer": longer > 0}
    right, margin = ordered_right(pairs["chosen"], pairs["rejected"]), pairs["chosen"] - pairs["rejected"]
    return {
        name: (float(right[mask].mean()), float(margin[mask].mean()), int(mask.sum()))
        for name, mask in groups.items()
        if bool(mask.any())
    }


def _by_length(axis: Axes, pairs: Pairs) -> None:
    shown = by_length(pairs)
    shares = [share for share, _, _ in shown.values()]
    whiskers = _whiskers(shares, [count for _, _, count in shown.values()])
    names = [
        f"{name}\npairs: {count}\nmean margin {margin:+.2f}" for name, (_, margin, count) in shown.items()
    ]
    bars = axis.bar(names, shares, yerr=whiskers, color=CHOSEN, alpha=0.8, width=0.6, capsize=4, ecolor=INK)
    for bar, share in zip(bars, shares, strict=True):  # at the foot, clear of the whisker
        axis.annotate(f"{share:.2f}", (bar.get_x() + 0.3, 0.02), ha="center", color="white", fontsize=11)
    axis.axhline(0.5, color=INK, linewidth=1, linestyle="--")
    axis.tick_params(axis="x", labelsize=9)
    axis.set(title="By length, with 95 % intervals", ylabel="share of pairs ordered right", ylim=(0, 1.1))
