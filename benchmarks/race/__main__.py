"""``python -m benchmarks.race --peer-python PATH``: the same PPO iteration by TRL 1.10.0 and by this project.

Whole processes run in turn, on the same machine in the same minutes, ``--repeats`` times in alternating
order. An iteration is rollout, scoring and update; the first of each process warms up and does not count. A
figure is the median over a process's iterations, then over the repeats; a ratio is taken within each repeat
before its median. Processor time stands beside wall time and tells whether other work disturbed a run. Peak
memory is the kernel's high-water mark of the whole process, loading included, on both sides.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters import shape_at, write_reward_adapter
from benchmarks.floor import Shape, Work, floor
from benchmarks.machine import Clock, bandwidth, gemm_rate, run_json, run_main, write_json
from benchmarks.race.ours import PHASES, composed
from benchmarks.race.table import Run, floor_table, race_table
from benchmarks.race.task import write_prompts
from rlhf_lightning.config.schema import Config

QUANTIZATION = {"bf16": "none", "4bit": "nf4"}
BYTES_A_WEIGHT = {
    "none": 2.0,
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
}  # nf4: a byte a block of 64, scaled again
PEER, WARM_UP = "TRL 1.10.0", 1
PEER_COST = 3.0  # in runs of ours, for the time left


@dataclass(frozen=True)
class Side:
    """One process of the race: who, in which dtype, and the command that runs it."""

    system: str
    dtype: str
    command: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as place:
        words = ours_words(options, Path(place))
        sides = line_up(options, words)
        rounds = [sides if turn % 2 == 0 else sides[::-1] for turn in range(options.repeats)]
        clock = Clock([PEER_COST if s.system == PEER else 1.0 for sides in rounds for s in sides])
        runs = []
        for turn, order in enumerate(rounds):
            for side in order:
                found = run_json(side.command)
                runs.append(Run.of(side.system, side.dtype, turn, found, skip=WARM_UP))
                clock.tick(f"{side.dtype} {side.system}: {runs[-1].seconds:.1f} s an iteration")
        config = composed([*words, "model.quantization=none"])
    machine = {
        "flops": gemm_rate(torch.bfloat16),
        "bandwidth": bandwidth(),
        "threads": torch.get_num_threads(),
    }
    report(options, config, runs, machine)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description="PPO by TRL and by us.")
    parser.add_argument(
        "--peer-python", default=os.environ.get("PEER_PYTHON"), help="python of TRL's environment"
    )
    parser.add_argument("--model", default=None, help="folder of a chat model; default: that of bench_trl")
    parser.add_argument("--dtype", choices=["bf16", "4bit", "both"], default="both")
    parser.add_argument("--critic", choices=["adapter", "shared", "both"], default="both")
    parser.add_argument("--peer-value", choices=["full", "lora"], default="full", help="see peer_trl.py")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3, help="of each process; the first does not count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for our side")
    parser.add_argument("--out", type=Path, help="also write all figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.peer_python is None:
        parser.error(
            "--peer-python, or PEER_PYTHON in the environment, must name TRL's Python: see `make bench`"
        )
    if options.iterations <= WARM_UP or options.repeats < 1:
        parser.error(f"--iterations must be above {WARM_UP}, and --repeats at least 1")
    return options


def ours_words(options: argparse.Namespace, place: Path) -> list[str]:
    """Overrides of our side; the prompts and the reward adapter are made here."""
    words = [f"ppo.iterations={options.iterations}", *options.set]
    if options.model is not None:
        words.append(f"model.path={options.model}")
    prompts = place / "prompts.jsonl"
    bare = composed([*words, f"data.path={prompts}", "reward=length", "model.quantization=none"])
    write_prompts(prompts, bare.ppo.prompts_per_iteration)
    shape, lora = shape_at(bare.model.path), bare.model.lora
    reward = write_reward_adapter(place / "reward", shape, rank=lora.r, alpha=lora.alpha)
    return [*words, f"data.path={prompts}", f"reward.path={reward}"]


def line_up(options: argparse.Namespace, words: list[str]) -> list[Side]:
    """Every process of one round."""
    dtypes = ["bf16", "4bit"] if options.dtype == "both" else [options.dtype]
    critics = ["adapter", "shared"] if options.critic == "both" else [options.critic]
    config = composed(words)
    size = {"--batch": config.ppo.responses, "--length": config.generation.max_new_tokens}
    size["--iterations"] = options.iterations
    flags = [word for name, value in size.items() for word in (name, str(value))]
    model = str(Path(config.model.path).expanduser())
    sides = []
    for dtype in dtypes:
        peer = [options.peer_python, "-m", "benchmarks.race.peer_trl", model, "--dtype", dtype]
        sides.append(Side(PEER, dtype, [*peer, "--value", options.peer_value, *flags]))
        for critic in critics:
            own = [f"model.quantization={QUANTIZATION[dtype]}", f"model.critic={critic}"]
            command = [sys.executable, "-m", "benchmarks.race.ours", *words, *own]
            sides.append(Side(f"ours, critic={critic}", dtype, command))
    return sides


def least(config: Config, run: Run, machine: dict[str, Any]) -> dict[str, float]:
    """Floor in seconds of one of our runs, by phase."""
    shape = Shape.of(shape_at(config.model.path), rank=config.model.lora.r)
    work = Work(
        answers=config.ppo.responses,
        prompt=run.prompt_tokens,
        response=config.generation.max_new_tokens,
        epochs=config.ppo.epochs,
        critic=run.system.endswith("adapter"),
    )
    stored = BYTES_A_WEIGHT[QUANTIZATION[run.dtype]] * shape.matrices
    stored += 2.0 * (shape.adapter + shape.vocab * shape.hidden)
    counted = floor(shape, work, weight_bytes=stored)
    return counted.seconds(flops=machine["flops"], bandwidth=machine["bandwidth"])


def report(options: argparse.Namespace, config: Config, runs: Sequence[Run], machine: dict[str, Any]) -> None:
    """Print both tables, and write the file where one is wanted."""
    own = [run for run in runs if run.system != PEER]
    floors = {(run.system, run.dtype): least(config, run, machine) for run in own}
    print(race_table(runs, peer=PEER))
    print(
        f"\nbfloat16 products {machine['flops'] / 1e9:.0f} GFLOP/s, reading {machine['bandwidth'] / 1e9:.0f} "
        f"GB/s, {machine['threads']} threads\n"
    )
    print(floor_table(own, floors, PHASES))
    flat = [{"system": s, "dtype": d, "floor": f} for (s, d), f in floors.items()]
    write_json(options.out, {"machine": machine, "runs": [vars(run) for run in runs], "floors": flat})


if __name__ == "__main__":
    run_main(main)
