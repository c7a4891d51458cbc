"""From base model to tuned policy in one command: SFT, reward model, PPO and DPO, each compared with SFT."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from rlhf_lightning.callbacks.files import write_json
from rlhf_lightning.config.cli import write_resolved
from rlhf_lightning.config.rewards import CombinedRewardConfig, LearnedRewardConfig, RewardConfig
from rlhf_lightning.config.schema import Config, StageConfig
from rlhf_lightning.console import make_console
from rlhf_lightning.run import run


def stages(config: Config, folder: Path) -> dict[str, Config]:
    """The runs of a pipeline by the names of their folders, in order, each a whole config of its own."""
    sft, reward, ppo, dpo = (folder / name for name in ("sft", "reward", "ppo", "dpo"))
    tuned = {"adapter": str(sft)}
    prize = learned_from(config.reward, str(reward))
    return {
        "sft": _derive(config, "sft"),
        "reward": _derive(config, "reward", model=tuned),
        "ppo": _derive(config, "ppo", model=tuned, reward=prize),
        "dpo": _derive(config, "dpo", model=tuned),
        "evaluate_ppo": _derive(
            config, "evaluate", model=tuned, reward=prize, run=str(ppo), evaluate={"against": str(dpo)}
        ),
        "evaluate_dpo": _derive(config, "evaluate", model=tuned, reward=prize, run=str(dpo)),
    }


def learned_from(reward: RewardConfig, folder: str) -> RewardConfig:
    """The reward with every learned part taken from ``folder``; one that has none is replaced by it whole."""
    if isinstance(reward, LearnedRewardConfig):
        return reward.model_copy(update={"path": folder})
    if isinstance(reward, CombinedRewardConfig) and any(
        isinstance(part.reward, LearnedRewardConfig) for part in reward.parts.values()
    ):
        parts = {
            name: part.model_copy(update={"reward": learned_from(part.reward, folder)})
            if isinstance(part.reward, LearnedRewardConfig)
            else part
            for name, part in reward.parts.items()
        }
        return reward.model_copy(update={"parts": parts})
    return LearnedRewardConfig(kind="learned", path=folder)


def run_pipeline(config: Config, folder: Path) -> float | None:
    """Run what is not finished yet, each stage in a folder of its own below ``folder``.

    A resumed pipeline leaves finished stages alone and continues the one that was under way.

    Returns:
        The objective of the evaluation of PPO, which a sweep reads.
    """
    console = make_console()
    value: float | None = None
    for number, (name, child) in enumerate((every := stages(config, folder)).items(), start=1):
        own = folder / name
        if _status(own) != "finished":
            console.rule(f"{number}/{len(every)}  {name}", align="left")
            under_way = (own / "checkpoints" / "last.ckpt").is_file()
            if not under_way:  # killed before there was anything to continue from
                shutil.rmtree(own, ignore_errors=True)
                own.mkdir(parents=True)
            child = child.model_copy(update={"resume": str(own) if under_way else None})
            write_resolved(child, own)
            value = run(child, own)
            gc.collect()  # one backbone at a time
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    rows = [figures(folder / name, name) for name in every]
    write_json(folder / "pipeline.json", rows)
    _show(rows)
    console.print(f"results   {folder}", markup=False, soft_wrap=True)
    return value


def figures(folder: Path, name: str) -> dict[str, Any]:
    """What a stage of a pipeline came to, from its summary."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    last, target = summary["last"], summary["objective"]
    more = {key: last[key] for key in ("eval/gold_win_rate", "eval/win_rate", "eval/kl") if key in last}
    return {"stage": name, "objective": target, "value": last.get(target), "wall_s": summary["wall_s"]} | more


def _status(folder: Path) -> str | None:
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8"))["status"] if path.is_file() else None


def _derive(config: Config, stage: str, **sections: Any) -> Config:
    """The config of one stage; sections are given as what differs, or whole."""
    update: dict[str, Any] = {"stage": StageConfig(name=stage), "objective": None, "resume": None}
    for key, value in sections.items():
        own = getattr(config, key)
        update[key] = own.model_copy(update=value) if isinstance(value, dict) else value
    return config.model_copy(update=update)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("stage", "figure", "value", "seconds"):
        table.add_column(title)
    for row in rows:
        value = "" if row["value"] is None else f"{row['value']:.4g}"
        table.add_row(row["stage"], row["objective"], value, f"{row['wall_s']:.0f}")
    make_console().print(table)
