"""Sentiment of the answer by VADER: ``reward.function=rlhf_lightning.rewards.vader:sentiment``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rlhf_lightning.errors import UserError


def sentiment(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """VADER's compound score of each response alone, -1 (negative) .. 1 (positive), 0 for an empty one.

    Hutto and Gilbert 2014, https://ojs.aaai.org/index.php/ICWSM/article/view/14550. A word list with rules:
    quick, and easily pleased by a heap of praise.
    """
    analyzer = _analyzer()
    return [analyzer.polarity_scores(response)["compound"] for response in responses]


@functools.cache
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise UserError(
            "the sentiment reward needs the package vaderSentiment: pip install 'rlhf-lightning[sentiment]'"
        ) from error
    return SentimentIntensityAnalyzer()
