"""``python -m benchmarks.plan_check``: the memory plan against the peak of real runs.

One iteration of PPO a case, on the CPU, each in a process of its own whose resident memory is read:
libraries, loading and all. Prompts are unlike each other and longer than ``data.max_prompt_length``, and no
token ends an answer: every row is as long as the plan takes it to be. Exit code 1 where a peak is off by more
than 15 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.machine import run_json, run_main
from rlhf_lightning.config.paths import cache_dir
from rlhf_lightning.config.schema import Config
from rlhf_lightning.planning.plan import Plan, make_plan

TOLERANCE = 0.15
MIB = 2**20
SENTENCE = "we came back for the noodles and the soup was as good as the first time that we sat here"
PROMPT, ANSWER = 96, 64


@dataclass(frozen=True)
class Case:
    """The settings in which the runs differ."""

    model: str
    micro_batch_size: int = 8
    checkpointing: bool = False
    critic: str = "adapter"
    quantization: str = "nf4"
    dtype: str = "bfloat16"
    batch_size: int = 16

    def __str__(self) -> str:
        name = self.model if self.model == "tiny" else "SmolLM2-135M"
        checkpointing = ", checkpointing" if self.checkpointing else ""
        return (
            f"{name}, {self.quantization} {self.dtype}, critic {self.critic}, "
            f"micro-batch {self.micro_batch_size}, rollout {self.batch_size}{checkpointing}"
        )

    def config(self, prompts: Path, threads: int) -> Config:
        return Config.model_validate(
            {
                "ppo": {
                    "iterations": 1, "prompts_per_iteration": 16, "minibatch_size": 16, "epochs": 1,
                    "micro_batch_size": self.micro_batch_size,
                },
                "model": {
                    "path": self.model, "quantization": self.quantization, "critic": self.critic,
                    "dtype": self.dtype, "gradient_checkpointing": self.checkpointing,
                },
                "data": {"path": str(prompts), "format": "text", "max_prompt_length": PROMPT},
                "generation": {
                    "max_new_tokens": ANSWER, "batch_size": self.batch_size, "ignore_eos": True,
                },
                "reward": {"kind": "length", "target": 8},
                "trainer": {"accelerator": "cpu", "threads": threads},
            }
        )  # fmt: skip


def unlike(number: int) -> str:
    """A long prompt whose last tokens begin as no other's do: what rows share is computed once."""
    return " ".join(f"{word} {number + 10}" for word in 6 * SENTENCE.split())


def cases(smollm2: str) -> Iterator[Case]:
    """One setting changed at a time."""
    for model, dtype in (("tiny", "float32"), (smollm2, "bfloat16")):
        base = Case(model, dtype=dtype)
        yield base
        yield replace(base, micro_batch_size=2)
        yield replace(base, checkpointing=True)
        yield replace(base, critic="shared")
        yield replace(base, quantization="none")
        if model != "tiny":
            yield replace(base, micro_batch_size=16)
            yield replace(base, micro_batch_size=16, checkpointing=True)
            yield replace(base, dtype="float32")


def run(config: Config, folder: Path) -> None:
    """Train, and print this process's highest resident memory by phase, in bytes."""
    import torch

    from benchmarks.phases import PhasePeaks
    from benchmarks.training import train

    peaks = PhasePeaks(torch.device("cpu"))
    train(config, folder, lambda stage: peaks.mark("update"), started=peaks.watch)
    print(json.dumps({phase: int(peak * 1e9) for phase, peak in peaks.peaks.items()}))


def measure(config: Config) -> dict[str, int]:
    """Peaks in bytes by phase of a run in its own process."""
    command = [sys.executable, "-m", "benchmarks.plan_check", "--run", config.model_dump_json()]
    return run_json(command)


def row(case: Case, plan: Plan, measured: dict[str, int]) -> tuple[str, float]:
    """One line of the table, MiB planned / measured, and the share that the peak is off by."""
    planned = {phase.name: phase.bytes for phase in plan.phases}
    off = plan.peak.bytes / max(measured.values()) - 1
    cells = [
        f"{planned[ours] / MIB:,.0f} / {measured[theirs] / MIB:,.0f}"
        for ours, theirs in (("rollout", "rollout"), ("scoring", "score"), ("update", "update"))
    ]
    return f"| {case} | {measured['load'] / MIB:,.0f} | {' | '.join(cells)} | {off:+.0%} |", abs(off)


def main(arguments: Sequence[str] | None = None) -> int:
    """Every case, or the one run that ``--run`` describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description="Plan and peak.")
    parser.add_argument("--smollm2", default=str(cache_dir() / "smollm2-135m-instruct"), help="its folder")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each run")
    parser.add_argument("--only", default="", help="the cases whose names hold this text")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = [case for case in cases(options.smollm2) if options.only in str(case)]
    if not chosen:
        parser.error(f"--only must be part of a case's name, got {options.only!r}")
    with tempfile.TemporaryDirectory() as folder:
        if options.run:
            run(Config.model_validate(json.loads(options.run)), Path(folder))
            return 0
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("".join(f"{unlike(number)}\n" for number in range(32)))
        print("| MiB planned / measured | loading | rollout | scoring | update | peak off by |")
        print("|---|---|---|---|---|---|")
        worst = 0.0
        for case in chosen:
            config = case.config(prompts, options.threads)
            line, off = row(case, make_plan(config), measure(config))
            worst = max(worst, off)
            print(line, flush=True)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    run_main(main)
