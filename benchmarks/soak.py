"""``python -m benchmarks.soak``: many iterations of a small run; does anything grow?

Resident memory, open files and seconds an iteration, at iteration 50 and at the end (medians of 20). Exit
code 1 where memory grew by more than 5 %, open files at all, or seconds by more than a quarter.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.machine import ROOT, markdown, middle, run_main, write_json
from rlhf_lightning import build
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import plan
from rlhf_lightning.run import run

SIZES = (
    "trainer=cpu", "logger=none", "callbacks.progress=false", "callbacks.show=1", "ppo.epochs=1",
    "generation.max_new_tokens=12", "ppo.prompts_per_iteration=8", "ppo.minibatch_size=8",
    "ppo.micro_batch_size=8", "ppo.lr=1e-4",
)  # fmt: skip
START, WINDOW = 50, 20


class Watch(Callback):
    """What the process holds after each iteration."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.rows: list[tuple[float, int, float]] = []
        self._ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = time.perf_counter()
        held = self.process.memory_info().rss / 2**20
        self.rows.append((held, self.process.num_fds(), now - self._ended))
        self._ended = now


def soak(iterations: int, words: Sequence[str]) -> list[tuple[float, int, float]]:
    """(resident MiB, open files, seconds) of each iteration."""
    watch, original = Watch(), build.build_callbacks

    def watched(*arguments: Any, **keywords: Any) -> list[Callback]:
        return [*original(*arguments, **keywords), watch]

    command = Command(ROOT / "conf", [*SIZES, f"ppo.iterations={iterations}", *words])
    build.build_callbacks = watched  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(plan(command).jobs[0], Path(folder))
    finally:
        build.build_callbacks = original
    return watch.rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Does anything grow?")
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key")
    parser.add_argument("--out", type=Path, help="also write every row to this JSON file")
    options = parser.parse_args(arguments)
    if options.iterations < START + 2 * WINDOW:
        parser.error(f"--iterations must be at least {START + 2 * WINDOW}, not {options.iterations}")
    rows = soak(options.iterations, options.set)
    write_json(options.out, rows)
    early, late = rows[START : START + WINDOW], rows[-WINDOW:]
    names = ("resident MiB", "open files", "seconds an iteration")
    pairs = [(middle([r[i] for r in early]), middle([r[i] for r in late])) for i in range(len(names))]
    table = [
        [name, f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}"] for name, (a, b) in zip(names, pairs, strict=True)
    ]
    print(markdown(["", f"iterations {START} on", "the last", "ratio"], table))
    (memory, held), (files, open_files), (fast, slow) = pairs
    return int(held > 1.05 * memory or open_files > files or slow > 1.25 * fast)


if __name__ == "__main__":
    run_main(main)
