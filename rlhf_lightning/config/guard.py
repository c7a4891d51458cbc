"""What a run watches itself for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_lightning.config.section import Section


class GuardConfig(Section):
    """Figures of PPO past which something has gone wrong; an empty limit watches nothing."""

    action: Literal["warn", "stop"] = Field(
        "warn", description="past a limit: say so once and go on, or save everything and end the run"
    )
    window: int = Field(
        5, ge=1, description="iterations whose mean is the start of a figure, or its best, or where it is now"
    )
    kl: float | None = Field(40.0, gt=0, description="objective/kl at most this, nats a response")
    ratio: float | None = Field(
        100.0, gt=1, description="policy/ratio_max at most this: the largest ratio of a token's probabilities"
    )
    entropy: float | None = Field(
        0.1, gt=0, lt=1, description="objective/entropy at least this share of its start"
    )
    length: float | None = Field(
        4.0, gt=1, description="rollout/length_mean at most this many times its start"
    )
    unended: float | None = Field(
        0.9, gt=0, lt=1, description="share of answers cut by max_new_tokens, where it began below that"
    )
    unique: float | None = Field(
        0.1, gt=0, le=1, description="rollout/unique_fraction at least this: different answers over all"
    )
    second: float | None = Field(
        5.0,
        gt=0,
        description="standard errors that a reward of weight 0 may fall from its best while the score rises; "
        "held-out win rates that contradict each other count as well",
    )
