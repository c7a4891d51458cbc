"""Which rows are only measured on, where no file of them is named."""

from __future__ import annotations

from typing import Literal

from rlhf_lightning.randomness import counted_seed

Part = Literal["train", "held_out", "all"]
SHARE = 0.1  # where the user says nothing


def share_held_out(share: float | None, *, stage: str, evaluating: bool) -> float:
    """Share of the rows that a run keeps apart where ``data.held_out`` names none.

    Args:
        share: ``data.held_out_share``; None: nothing was said.
        stage: the run's.
        evaluating: whether PPO evaluates while it trains; if not, it learns from every prompt.
    """
    if share is not None:
        return share
    return 0.0 if stage == "ppo" and not evaluating else SHARE


def is_held_out(text: str, share: float) -> bool:
    """Whether a row is kept for measuring, by its prompt: equal prompts fall on one side.

    The answer depends on the text alone, not on the run's seed, the file's order or its other rows: two runs,
    and two stages on the same prompts, keep the same ones apart.

    Args:
        text: the prompt, or what else stands for the row.
        share: expected share of texts that are held out, 0 to 1.
    """
    return counted_seed(0, "held_out", text) / 2**63 < share
