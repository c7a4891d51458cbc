"""samples.jsonl and the tracker's sample table: what the model wrote, and what it was worth."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.files import complete_lines, write_text
from rlhf_lightning.randomness import counted_seed
from rlhf_lightning.tracking import IterationWandbLogger
from rlhf_lightning.types import Rollout

# JSON itself escapes only U+0000..U+001F. These would end a line for some readers, act on a terminal, or
# (half of a surrogate pair) have no form in UTF-8.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def json_line(row: dict[str, Any]) -> str:
    """One object on one line, readable in any script, equal to ``row`` when read back."""
    text = json.dumps(row, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def sample_rows(rollout: Rollout, *, iteration: int, wanted: set[int] | None = None) -> list[dict[str, Any]]:
    """A record for each response whose global row number is ``wanted`` (None: all), in the order of the rows.

    ``score`` is what the reward gave; ``kl`` the sum over the response, nats; ``length`` in tokens, the end
    token included.
    """
    scores, kl = rollout.raw_scores.tolist(), rollout.kl.sum(dim=1).tolist()
    lengths, numbers = rollout.lengths.tolist(), rollout.rows.tolist()
    kept = [i for i, number in enumerate(numbers) if wanted is None or number in wanted]
    return [
        {
            "iteration": iteration,
            "prompt": rollout.prompts[i],
            "response": rollout.responses[i],
            "score": scores[i],
            "kl": kl[i],
            "length": lengths[i],
            "ended": rollout.ended[i],
        }
        for i in sorted(kept, key=lambda i: numbers[i])
    ]


class Samples(Callback):
    """Appends ``count`` responses of each iteration (0: all) to samples.jsonl, chosen by a counted seed.

    Every ``table_every`` iterations, and in the last one, the same rows go to the tracker as a table of their
    own: a W&B table is frozen by its first log, so each log makes a new one, which holds that iteration's
    rows.
    """

    def __init__(
        self, path: Path, *, count: int, responses: int, seed: int, table_every: int, resume_from: int = 0
    ) -> None:
        """``responses``: answers of one rollout on all ranks; ``resume_from``: the first iteration here."""
        self.path = path
        self._count = count
        self._responses = responses
        self._seed = seed
        self._table_every = table_every
        self._resume_from = resume_from

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self.path.exists():
            lines = complete_lines(self.path)
            kept = [line for line in lines if json.loads(line)["iteration"] < self._resume_from]
            write_text(self.path, "".join(line + "\n" for line in kept))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, iteration = iterating(pl_module), trainer.current_epoch
        rows = sample_rows(module.rollout, iteration=iteration, wanted=self._wanted(iteration))
        rows = _gather(trainer, rows)
        if not trainer.is_global_zero:
            return
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(json_line(row) for row in rows))
        if iteration % self._table_every == 0 or iteration == module.total_iterations - 1:
            for logger in trainer.loggers:
                if isinstance(logger, IterationWandbLogger):
                    logger.log_rows("samples", rows, iteration=iteration)

    def _wanted(self, iteration: int) -> set[int] | None:
        if self._count == 0 or self._count >= self._responses:
            return None
        generator = random.Random(counted_seed(self._seed, "samples", iteration))
        return set(generator.sample(range(self._responses), self._count))


def _gather(trainer: Trainer, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all ranks, rank by rank; ranks hold consecutive slices of the global batch."""
    if trainer.world_size == 1:
        return rows
    parts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(parts, rows)
    return [row for part in parts for row in part]
