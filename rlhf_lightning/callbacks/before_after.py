"""The same few prompts, answered before the first update and after the last."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.callbacks.files import write_json
from rlhf_lightning.randomness import counted_seed
from rlhf_lightning.types import Prompts


class BeforeAfter(Callback):
    """Keeps before_after.json: a list of ``prompt, before, before_score, after, after_score``.

    The prompts are ``count`` different ones of the first batch, chosen by a counted seed, so a rerun shows
    the same. They and the first answers travel in the checkpoint, for a resumed run. Until the end of the fit
    "after" is null.
    """

    def __init__(self, path: Path, *, count: int, seed: int) -> None:
        self.path = path
        self._count = count
        self._seed = seed
        self._prompts: Prompts | None = None
        self._before: list[tuple[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        if self._prompts is None:
            return {}
        return {
            "ids": [list(ids) for ids in self._prompts.ids],
            "texts": list(self._prompts.texts),
            "before": [list(answer) for answer in self._before],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._prompts = _prompts(state_dict["ids"], state_dict["texts"])
            self._before = [(text, score) for text, score in state_dict["before"]]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch != 0 or self._prompts is not None:
            return  # the first iteration may have been cut, and go on with moved weights
        self._prompts = trainer.strategy.broadcast(self._choose(batch))
        self._before = iterating(pl_module).answer(self._prompts)
        self._write(trainer, after=[(None, None)] * len(self._before))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._prompts is not None:
            self._write(trainer, after=iterating(pl_module).answer(self._prompts))

    def _choose(self, batch: Prompts) -> Prompts:
        places = [i for i, text in enumerate(batch.texts) if text not in batch.texts[:i]]
        generator = random.Random(counted_seed(self._seed, "show"))
        chosen = generator.sample(places, min(self._count, len(places)))
        return _prompts([batch.ids[i] for i in chosen], [batch.texts[i] for i in chosen])

    def _write(self, trainer: Trainer, *, after: list[Any]) -> None:
        if self._prompts is None or not trainer.is_global_zero:
            return
        names = ("prompt", "before", "before_score", "after", "after_score")
        answers = zip(self._prompts.texts, self._before, after, strict=True)
        write_json(
            self.path, [dict(zip(names, (prompt, *old, *new), strict=True)) for prompt, old, new in answers]
        )


def _prompts(ids: list[Any], texts: list[str]) -> Prompts:
    return Prompts(ids=tuple(tuple(one) for one in ids), texts=tuple(texts), rows=tuple(range(len(texts))))
