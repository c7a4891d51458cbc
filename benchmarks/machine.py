"""What this machine can do at most, and how a measured process is run and read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch

from rlhf_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


class Failed(Exception):
    """A measured process ended without a result."""


def gemm_rate(dtype: torch.dtype, *, device: str = "cpu", size: int = 2048, repeats: int = 5) -> float:
    """Multiply-adds of a square product, counted as two operations each, FLOP/s: the best of ``repeats``."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: a @ b, device, repeats)


def bandwidth(*, device: str = "cpu", size: int = 2**28, repeats: int = 5) -> float:
    """Bytes/s at which ``size`` bytes are read once: the best of ``repeats``."""
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / _fastest(data.sum, device, repeats)


def _fastest(work: Callable[[], object], device: str, repeats: int) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    times = []
    for _ in range(repeats + 1):
        wait()
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def run_json(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a process in the repository's root and read the JSON object on its last line of output.

    Raises:
        Failed: it ended with another exit code than 0, or without such a line.
    """
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"} | dict(env or {})
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    try:
        if done.returncode == 0:
            return json.loads(lines[-1])
    except (IndexError, ValueError):
        pass
    said = "\n".join((done.stderr.strip().splitlines() or ["nothing"])[-12:])
    raise Failed(f"{' '.join(map(str, command))} ended with exit code {done.returncode}:\n{said}")


def write_json(out: Path | None, figures: object) -> None:
    """Write figures to the file that ``--out`` names, where it names one."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark as a program: its exit code, and one line for what it cannot do."""
    try:
        sys.exit(main())
    except (UserError, Failed) as error:
        sys.exit(f"error: {error}")


class Clock:
    """Progress on stderr: what is done of how much, and when the rest will be.

    Args:
        weights: expected cost of each step in any unit; the time left is told by what was done of it.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = list(weights)
        self.done = 0
        self.started = time.monotonic()

    def tick(self, text: str) -> None:
        """Say that one more step is done."""
        self.done += 1
        passed = sum(self.weights[: self.done])
        left = (time.monotonic() - self.started) * (sum(self.weights) / passed - 1)
        line = f"[{self.done}/{len(self.weights)}] {text}, {left:.0f} s left"
        print(line, file=sys.stderr, flush=True)


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    cells = [list(head), ["---"] + ["--:"] * (len(head) - 1), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def middle(values: Sequence[float]) -> float:
    """The median.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("the median of nothing")
    return float(median(values))
