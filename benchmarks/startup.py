"""``python -m benchmarks.startup``: how long a user waits, each figure the median over fresh processes.

The third figure starts when Lightning, Transformers, PEFT and bitsandbytes are imported and ends with the
first token that the default run (the tiny model, W&B offline) samples. Unlike ``train.py``, the measured
process imports them before it judges the config, so the judging is in the figure too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, run

from benchmarks.machine import ROOT, Clock, Failed, markdown, middle, run_json, run_main, write_json

FIRST_TOKEN = "--first-token"


def whole_process(words: Sequence[str], code: int) -> float:
    """Seconds of ``python train.py WORDS``.

    Raises:
        Failed: it ended with another exit code than ``code``.
    """
    command = [sys.executable, "train.py", *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    ended = run(command, cwd=ROOT, env=variables, stdout=DEVNULL, stderr=DEVNULL).returncode
    seconds = time.perf_counter() - started
    if ended != code:
        raise Failed(f"{' '.join(command)} ended with exit code {ended}, not {code}")
    return seconds


def first_token() -> float:
    """Seconds from the imports to the first token, in a process of its own."""
    return float(run_json([sys.executable, "-m", "benchmarks.startup", FIRST_TOKEN])["seconds"])


# What is waited for, the most that it may take in seconds, and how it is measured.
MEASURED: list[tuple[str, float, Callable[[], float]]] = [
    ("`python train.py --help`", 1.0, lambda: whole_process(["--help"], 0)),
    ("a config error, `ppo.clp=0.2`", 2.0, lambda: whole_process(["ppo.clp=0.2"], 1)),
    ("imports to the first sampled token, tiny run", 3.0, first_token),
]


class _Sampled(BaseException):
    """Ends the measured process at its first token; no ``except Exception`` on the way catches it."""


def sample_one() -> float:
    """Start the default run in this process, up to its first token."""
    import bitsandbytes  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    started = time.perf_counter()
    from rlhf_lightning.config.cli import main
    from rlhf_lightning.rollout import sampling

    right, took = sampling.draw, 0.0

    def draw(*arguments, **keywords):  # type: ignore[no-untyped-def]
        nonlocal took
        right(*arguments, **keywords)
        took = time.perf_counter() - started
        raise _Sampled

    sampling.draw = draw  # before the rollout imports it by name
    with tempfile.TemporaryDirectory() as folder, suppress(_Sampled):
        main(ROOT, [f"hydra.run.dir={folder}/run"])
    if not took:
        raise Failed("the run ended without a token")
    return took


def table(found: Sequence[Sequence[float]]) -> str:
    """Medians beside what was aimed at; a row of ``MEASURED`` each."""
    rows = [
        [name, f"{middle(times):.2f}", f"{limit:.0f}", "yes" if middle(times) < limit else "no"]
        for (name, limit, _), times in zip(MEASURED, found, strict=True)
    ]
    return markdown(["what a user waits for", "seconds, median", "target, under", "met"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description="Start-up times.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write all figures to this JSON file")
    parser.add_argument(FIRST_TOKEN, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.first_token:
        print(json.dumps({"seconds": sample_one()}))
        return 0
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    clock = Clock([1.0] * options.repeats)
    found: list[list[float]] = [[] for _ in MEASURED]
    for _ in range(options.repeats):
        for times, (_, _, measure) in zip(found, MEASURED, strict=True):
            times.append(measure())
        clock.tick(", ".join(f"{times[-1]:.2f} s" for times in found))
    print(table(found))
    write_json(options.out, {name: times for (name, _, _), times in zip(MEASURED, found, strict=True)})
    return 0


if __name__ == "__main__":
    run_main(main)
