"""Held-out answers judged while PPO trains, and the files that an evaluation leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.files import write_json, write_text
from rlhf_lightning.callbacks.samples import json_line
from rlhf_lightning.config.schema import Config
from rlhf_lightning.stages.evaluate import ANSWERERS, Evaluation, Evaluator, held_out_prompts
from rlhf_lightning.tracking import IterationWandbLogger


class EvaluationCallback(Callback):
    """Adds eval/... to ``module.metrics`` every ``evaluate.every`` iterations and in the last one.

    It carries no state: its draws are counted apart from the training's, and the reference's answers, which
    do not change, are asked once in each process. The last evaluation is in evaluation.json and
    evaluation.jsonl.
    """

    def __init__(self, run_dir: Path, config: Config) -> None:
        self.run_dir = run_dir
        self.config = config
        self._evaluator: Evaluator | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model: Any = pl_module
        backbone = model.actor_critic.backbone
        prompts, _ = held_out_prompts(self.config, backbone.tokenizer, context=backbone.context_length)
        self._evaluator = Evaluator(model.actor_critic, model.reward, prompts, self.config)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, iteration = iterating(pl_module), trainer.current_epoch
        ends = iteration + 1 >= module.total_iterations or trainer.should_stop
        if not ends and (iteration + 1) % self.config.evaluate.every:
            return
        assert self._evaluator is not None
        found = self._evaluator()
        module.metrics |= found.metrics
        if not trainer.is_global_zero:
            return
        write_evaluation(self.run_dir, found, {"iteration": iteration})
        for logger in trainer.loggers:
            if isinstance(logger, IterationWandbLogger):
                logger.log_rows("evaluation", flat_rows(found.rows), iteration=iteration)


def write_evaluation(folder: Path, found: Evaluation, about: dict[str, Any]) -> None:
    """evaluation.json: ``about`` and the figures with their intervals; evaluation.jsonl: the answers."""
    write_json(folder / "evaluation.json", {**about, **found.report, "metrics": found.metrics})
    write_text(folder / "evaluation.jsonl", "".join(json_line(row) for row in found.rows))


def flat_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers as a table: a column for each role's response, another for its score."""
    return [
        {"prompt": row["prompt"], "kl": row["kl"]}
        | {role: row[role]["response"] for role in ANSWERERS if role in row}
        | {f"{role}_score": row[role]["score"] for role in ANSWERERS if role in row}
        for row in rows
    ]
