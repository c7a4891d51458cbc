"""``python -m benchmarks.seven_b FOLDER``: one whole PPO iteration of a 7B model on a CPU, memory by phase.

    python -m scripts.random_llama FOLDER          # 13.5 GB, once; any Llama's folder does

Four roles on one nf4 backbone with double quantisation, ``model=llama7b`` as it is: policy and critic train
LoRA r=16, the reference is the bare backbone, the reward an adapter with random weights. Two prompts of 32
tokens, 8 new tokens each, one epoch. Exit code 1 where the peak is above ``--limit``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.adapters import shape_at, write_reward_adapter
from benchmarks.machine import ROOT, markdown, run_main, write_json
from benchmarks.phases import PhasePeaks
from benchmarks.training import train
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import plan
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError
from rlhf_lightning.stages.ppo import PPO

LIMIT_GB = 8.0
SENTENCE = "The soup was warm and the bread was fresh, and we would come back for the noodles any day. "
PHASES = ("load", "rollout", "score", "update")


def compose(folder: Path, place: Path, words: Sequence[str]) -> Config:
    """The run on the model in ``folder``; prompts and reward adapter are written to ``place``."""
    prompts = place / "prompts.txt"
    prompts.write_text(2 * (SENTENCE * 8 + "\n"), encoding="utf-8")
    common = ["model=llama7b", f"model.path={folder}", f"data.path={prompts}", "data=text", *SIZES, *words]
    bare = plan(Command(ROOT / "conf", [*common, "reward=length"])).jobs[0]
    lora = bare.model.lora
    reward = write_reward_adapter(place / "reward", shape_at(str(folder)), rank=lora.r, alpha=lora.alpha)
    return plan(Command(ROOT / "conf", [*common, "reward=learned", f"reward.path={reward}"])).jobs[0]


SIZES = (
    "trainer=cpu", "logger=none", "data.max_prompt_length=32", "generation.max_new_tokens=8",
    "generation.ignore_eos=true", "ppo.iterations=1", "ppo.prompts_per_iteration=2", "ppo.minibatch_size=2",
    "ppo.micro_batch_size=2", "ppo.epochs=1",
)  # fmt: skip


def measure(folder: Path, words: Sequence[str] = ()) -> dict[str, object]:
    """Train one iteration; peaks by phase in GB, seconds by phase, bytes by role."""
    peaks = PhasePeaks(torch.device("cpu"))
    found: dict[str, object] = {}
    started = time.perf_counter()
    seconds: dict[str, float] = {}

    def begin(stage: PPO) -> None:
        seconds["load"] = time.perf_counter() - started
        print(f"loaded in {seconds['load']:.0f} s", file=sys.stderr, flush=True)
        peaks.watch(stage)

    def tell(stage: PPO) -> None:
        peaks.mark("update")
        seconds.update({name: stage.metrics[f"time/{name}_s"] for name in PHASES[1:]})
        found["roles"] = {row.name: row.bytes for row in stage.actor_critic.weights()}
        assert stage.rollout is not None
        found["prompt_tokens"] = stage.rollout.prompt_mask.sum(dim=1).tolist()
        found["response_tokens"] = stage.rollout.lengths.tolist()

    with tempfile.TemporaryDirectory() as place:
        train(compose(folder, Path(place), words), Path(place), tell, started=begin)
    return found | {"peaks_gb": peaks.peaks, "seconds": seconds, "peak_gb": peaks.highest}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seven_b", description="7B on a CPU.")
    parser.add_argument("folder", type=Path, help="a Llama's folder, as scripts.random_llama writes it")
    parser.add_argument("--limit", type=float, default=LIMIT_GB, help="GB that the peak may reach")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    folder = options.folder.expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: `python -m scripts.random_llama {folder}` writes one")
    found = measure(folder, options.set)
    print(table(found))
    write_json(options.out, found)
    return 0 if found["peak_gb"] <= options.limit else 1  # type: ignore[operator]


def table(found: dict) -> str:
    """Seconds and peak of each phase."""
    peaks, seconds = found["peaks_gb"], found["seconds"]
    rows = [[name, f"{seconds[name]:.0f}", f"{peaks[name]:.2f}"] for name in PHASES]
    return markdown(["phase", "seconds", "peak GB"], rows)


if __name__ == "__main__":
    run_main(main)
