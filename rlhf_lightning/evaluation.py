"""``stage=evaluate``: load what a run trained, ask it, compare it, write it down and show it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_lightning.build import learned_path, pick_device, reward_on
from rlhf_lightning.callbacks.evaluation import flat_rows, write_evaluation
from rlhf_lightning.callbacks.files import write_json
from rlhf_lightning.callbacks.summary import versions
from rlhf_lightning.callbacks.throughput import peak_memory, reset_peak_memory
from rlhf_lightning.config.locate import run_of
from rlhf_lightning.config.schema import Config
from rlhf_lightning.config.subject import read_config
from rlhf_lightning.console import print_plan, safe_text
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import evaluate_cast
from rlhf_lightning.stages.evaluate import Evaluation, Evaluator, held_out_prompts
from rlhf_lightning.tracking import IterationWandbLogger, build_loggers, close_trackers


def evaluate_run(config: Config, output_dir: Path, console: Console) -> dict[str, float]:
    """Look at ``config.run`` and leave evaluation.json, evaluation.jsonl and summary.json in ``output_dir``.

    Returns:
        The figures by name, eval/...

    Raises:
        UserError: something cannot be loaded, read or judged.
    """
    start = time.perf_counter()
    with console.status(f"Loading {config.model.name} ..."):
        evaluator, data, warning = build_evaluator(config)
    device = evaluator.actor_critic.device
    reset_peak_memory(device)
    print_plan(console, config, roles=evaluator.actor_critic.weights(), data=data)
    if warning is not None:
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    exit_code = 1
    try:
        loggers = build_loggers(config, output_dir)
        with console.status("") as status:
            found = evaluator(lambda role, done, total: status.update(f"{role}: {done} of {total} answers"))
        write_evaluation(output_dir, found, {"run": config.run, "against": config.evaluate.against})
        tokens = sum(row[role]["length"] for row in found.rows for role in found.report["answers"])
        seconds = time.perf_counter() - start
        for logger in loggers:
            if isinstance(logger, IterationWandbLogger):
                logger.log_rows("evaluation", flat_rows(found.rows), iteration=0)
            logger.log_metrics({"iteration": 0} | found.metrics, step=0)
            logger.finalize("success")
        exit_code = 0
    finally:
        close_trackers(exit_code)
    summary = {
        "status": "finished",
        "error": None,
        "objective": config.target[0],
        "last": found.metrics,
        "best": found.metrics,
        "wall_s": seconds,
        "peak_memory_gb": peak_memory(device),
        "tokens_per_s": tokens / seconds,
        "versions": versions(),
    }
    write_json(output_dir / "summary.json", summary)
    print_evaluation(console, found, show=config.evaluate.show)
    console.print(f"results   {output_dir}", markup=False, soft_wrap=True)
    return found.metrics


def build_evaluator(config: Config) -> tuple[Evaluator, str, str | None]:
    """The roles on their backbone and the held-out prompts; one line about these, and a warning or None."""
    assert config.run is not None  # a rule of the config
    seed_everything(config.seed, verbose=False)
    backbone = load_backbone(config.model, device=pick_device(config))
    cast = evaluate_cast(
        config.model, run=config.run, against=config.evaluate.against, reward_path=learned_path(config)
    )
    actor_critic = ActorCritic(backbone, config.model, cast=cast, temperature=config.generation.temperature)
    place = Path(config.run).expanduser()
    folder = run_of(place.parent if place.parent.name == "adapters" else place)
    trained = read_config(folder, f"run={config.run}") if folder is not None else None
    prompts, warning = held_out_prompts(
        config, backbone.tokenizer, context=backbone.context_length, trained=trained
    )
    evaluator = Evaluator(actor_critic, reward_on(actor_critic, config), prompts, config)
    asked = len(evaluator.prompts.ids)
    return evaluator, f"{prompts.report}; {asked} answers by each role", warning


def print_evaluation(console: Console, found: Evaluation, *, show: int) -> None:
    """Some prompts with their answers side by side, the answerers' figures, and who wins how often."""
    roles = list(found.report["answers"])
    rows = [row for row in found.rows if row["sample"] == 0][:show]
    if rows:
        console.print(_side_by_side(rows, roles))
        console.print()
    console.print(_figures(found.report, roles))
    console.print()
    console.print(_win_rates(found.report))
    share = f"{found.report['confidence']:.0%}"
    console.print(f"{share} intervals by bootstrap over {found.report['prompts']} prompts; ties count half")


def _figures(report: dict[str, Any], roles: Sequence[str]) -> Table:
    """Means by role, and the policy's interval."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure")
    for name in (*roles, "policy from", "to"):
        table.add_column(name, justify="right")
    figures = {
        name: [report["answers"][role][name] for role in roles] for name in report["answers"]["policy"]
    }
    figures["kl"] = [report["kl"]]
    for name, values in figures.items():
        means = [f"{value['mean'] if isinstance(value, dict) else value:.3f}" for value in values]
        ends = [f"{values[0][end]:.3f}" for end in ("low", "high")] if isinstance(values[0], dict) else []
        table.add_row(safe_text(name), *means, *[""] * (len(roles) - len(means)), *ends)
    return table


def _win_rates(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("win rate")
    table.add_column("by")
    for name in ("mean", "from", "to", "ties"):
        table.add_column(name, justify="right")
    for against, rates in report["win_rates"].items():
        for name, rate in rates.items():
            numbers = (f"{rate[key]:.3f}" for key in ("win_rate", "low", "high", "ties"))
            table.add_row(against, safe_text(name), *numbers)
    return table


def _side_by_side(rows: Sequence[dict[str, Any]], roles: Sequence[str]) -> Table:
    table = Table(show_lines=True, header_style="bold")
    for name in ("prompt", *roles):
        table.add_column(name, overflow="fold", ratio=1)
    for row in rows:
        cells = [
            Text(f"{row[role]['score']:+.3f}  ", style="dim") + safe_text(row[role]["response"])
            for role in roles
        ]
        table.add_row(safe_text(row["prompt"]), *cells)
    return table
