"""The estimators side by side: which settings make each, and the table of what they reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.exact_optimum.measure import Result

CHOICES = Path(__file__).resolve().parents[2] / "conf" / "advantage"
ESTIMATORS = ("gae", "reinforce", "reinforce_plus_plus", "rloo", "grpo", "dr_grpo")
NAMES = {
    "gae": "PPO (GAE, a critic)",
    "reinforce": "REINFORCE",
    "reinforce_plus_plus": "REINFORCE++",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
}


def settings_of(estimator: str) -> dict[str, Any]:
    """Dotted key -> value, as ``advantage=ESTIMATOR`` sets them on the command line."""
    values = yaml.safe_load((CHOICES / f"{estimator}.yaml").read_text(encoding="utf-8"))
    sections = {"advantage": values} if "kind" in values else values
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def comparison(results: Sequence[Result]) -> str:
    """Shares of J* - J_ref as Markdown: a row an estimator, a column a pair of beta and seed."""
    pairs = list(dict.fromkeys((r.beta, r.seed) for r in results))
    heads = [f"beta {beta:g}, seed {seed}" for beta, seed in pairs]
    lines = [
        f"| advantage | {' | '.join(heads)} | mean | KL / KL of the optimum | CPU s a run |",
        f"|---|{'--:|' * (len(pairs) + 3)}",
    ]
    for name in dict.fromkeys(r.advantage for r in results):
        rows = {(r.beta, r.seed): r for r in results if r.advantage == name}
        shares = [100 * rows[pair].figures.share for pair in pairs]
        kl = sum(r.figures.kl / r.figures.kl_optimum for r in rows.values()) / len(rows)
        cpu = sum(r.cpu_seconds for r in rows.values()) / len(rows)
        cells = " | ".join(f"{share:.1f} %" for share in shares)
        lines.append(
            f"| {NAMES[name]} | {cells} | {sum(shares) / len(shares):.1f} % | {kl:.2f} | {cpu:.0f} |"
        )
    return "\n".join(lines)
