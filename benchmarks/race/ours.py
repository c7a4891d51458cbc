"""Our side: ``experiment=bench_trl`` under a bare Trainer. The last line printed is JSON.

python -m benchmarks.race.ours data.path=FILE reward.path=FOLDER model.critic=shared ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.machine import ROOT
from benchmarks.race.peak import peak_rss_gb
from benchmarks.race.stamps import Stamps
from benchmarks.training import train
from rlhf_lightning.callbacks.throughput import peak_memory
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import plan
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

PHASES = ("rollout", "score", "update")


def composed(words: list[str]) -> Config:
    """The config of ``train.py experiment=bench_trl WORDS``.

    Raises:
        UserError: a word is wrong.
    """
    return plan(Command(ROOT / "conf", ["experiment=bench_trl", *words])).jobs[0]


def measure(config: Config) -> dict[str, object]:
    """Train, and report seconds of each iteration and phase, tokens of the last prompt batch, peak memory."""
    stamps = Stamps()
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    widths: list[int] = []

    def tell(stage) -> None:  # type: ignore[no-untyped-def]
        stamps.mark()
        for name in PHASES:
            phases[name].append(stage.metrics[f"time/{name}_s"])
        widths.append(int(stage.rollout.prompt_mask.sum(dim=1).float().mean().ceil()))

    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), tell, started=lambda _: stamps.mark())
    result: dict[str, object] = {
        "seconds": stamps.seconds,
        "cpu_seconds": stamps.cpu_seconds,
        "phases": phases,
        "prompt_tokens": max(widths),
        "peak_gb": peak_rss_gb(),
    }
    if torch.cuda.is_available():
        result["peak_gpu_gb"] = peak_memory(torch.device("cuda")) * 2**30 / 1e9
    return result


if __name__ == "__main__":
    try:
        print(json.dumps(measure(composed(sys.argv[1:]))))
    except UserError as error:
        sys.exit(f"error: {error}")
