"""What the callbacks of this folder expect of the LightningModule they watch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, cast

from lightning.pytorch import LightningModule

from rlhf_lightning.types import Prompts, Rollout

Phase = Literal["rollout", "score", "update"]


class Iterating(Protocol):
    """A module that trains one iteration a Trainer epoch; ``trainer.current_epoch`` is the iteration, from 0.

    ``metrics``, ``rollout`` and ``counters`` are those of the iteration that just ended, from
    ``on_train_batch_end`` on. Callbacks may add to ``metrics``; ``rollout/tokens`` counts the tokens sampled
    on all ranks.
    """

    metrics: dict[str, float]
    rollout: Rollout
    counters: dict[str, int]  # of the whole run, resumed parts included: optimizer_steps, responses, tokens
    progress: Callable[[str, int, int], None]  # (phase, done, total), phase one of rollout, score, update
    pause: Callable[[Phase], None]  # called where the run may stop and be continued exactly; may raise

    @property
    def total_iterations(self) -> int: ...

    def answer(self, prompts: Prompts) -> list[tuple[str, float]]:
        """The answer and its score for each prompt, with the same random numbers at each call.

        Called on every rank with the same prompts.
        """
        ...

    def save_adapters(self, folder: Path) -> None:
        """Write adapters and heads into an empty folder; called on every rank, rank zero writes."""
        ...


def iterating(module: LightningModule) -> Iterating:
    """The module by the attributes above, which ``nn.Module.__getattr__`` hides from a type checker."""
    return cast(Iterating, module)
