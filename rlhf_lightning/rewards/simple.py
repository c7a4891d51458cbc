"""Rewards that need nothing but the answer's text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_lightning.config.rewards import LengthRewardConfig, RegexRewardConfig
from rlhf_lightning.rewards.base import checked
from rlhf_lightning.types import Scores


class LengthReward:
    """-|words - target| / target: 0 at the target, -1 for an empty answer."""

    def __init__(self, config: LengthRewardConfig, *, name: str = "reward") -> None:
        self.target = config.target
        self.name = name

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        values = [-abs(len(response.split()) - self.target) / self.target for response in responses]
        return Scores(checked(values, name=self.name, prompts=prompts, responses=responses), {})


class RegexReward:
    """1 where the pattern is found in the answer (``full``: is the whole answer), 0 elsewhere.

    Python's ``re`` cannot be stopped, so a pattern that backtracks without end stops the run from going on;
    ``(?>...)`` and possessive quantifiers keep a pattern linear.
    """

    def __init__(self, config: RegexRewardConfig, *, name: str = "reward") -> None:
        pattern = re.compile(config.pattern)  # the config has already been refused where this fails
        self.matches = pattern.fullmatch if config.full else pattern.search
        self.name = name

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        values = [self.matches(response) is not None for response in responses]
        return Scores(checked(values, name=self.name, prompts=prompts, responses=responses), {})
