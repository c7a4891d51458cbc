"""Length, regular expression, sentiment, combination, and the dispatch from the config."""

from __future__ import annotations

import sys

import pytest
import torch
from pydantic import TypeAdapter

from rlhf_lightning.config.rewards import RewardConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import Reward
from rlhf_lightning.rewards.build import build_reward
from rlhf_lightning.rewards.combine import CombinedReward
from rlhf_lightning.rewards.vader import _analyzer, sentiment
from rlhf_lightning.types import Scores

CONFIG: TypeAdapter = TypeAdapter(RewardConfig)


def build(**config: object) -> Reward:
    return build_reward(CONFIG.validate_python(config))


def scores(reward: Reward, *responses: str) -> list[float]:
    return reward(["prompt"] * len(responses), list(responses)).scores.tolist()


def test_length_is_minus_the_share_of_the_target_missed() -> None:
    reward = build(kind="length", target=4)
    assert scores(reward, "a b c d", "a b", "", "  a  b\nc d e ", "a " * 12) == [0.0, -0.5, -1.0, -0.25, -2.0]


def test_regex_is_one_where_found() -> None:
    reward = build(kind="regex", pattern=r"(?i)\bthanks\b")
    assert scores(reward, "Thanks!", "no thanksgiving", "", "so\nthanks") == [1.0, 0.0, 0.0, 1.0]


def test_regex_full_asks_for_the_whole_answer() -> None:
    reward = build(kind="regex", pattern="a+|b", full=True)
    assert scores(reward, "aaa", "aab", "b", "", "b\n") == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_sentiment_judges_the_response_alone() -> None:
    good, bad, empty = sentiment(["awful, terrible"] * 3, ["a wonderful, great film", "boring and bad", ""])
    assert good == pytest.approx(0.8316, abs=1e-4)  # VADER's own figure for this sentence
    assert bad < -0.5 and empty == 0.0
    assert sentiment(["great " * 50], ["the door is open"]) == [0.0]


def test_sentiment_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _analyzer.cache_clear()
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    reward = build(kind="function", function="rlhf_lightning.rewards.vader:sentiment")
    with pytest.raises(
        UserError, match=r"^the sentiment reward needs .* pip install 'rlhf-lightning\[sentiment\]'$"
    ):
        reward(["p"], ["r"])


def test_a_combination_is_the_weighted_sum_and_keeps_each_term_before_its_weight() -> None:
    reward = build(
        kind="combined",
        parts={
            "brief": {"weight": 0.5, "reward": {"kind": "length", "target": 2}},
            "hello": {"weight": -3.0, "reward": {"kind": "regex", "pattern": "hello"}},
        },
    )
    scored = reward(["p"] * 3, ["hello you", "one", "hello a b c"])
    assert scored.scores.tolist() == [-3.0, -0.25, -3.5]
    assert {name: part.tolist() for name, part in scored.parts.items()} == {
        "brief": [0.0, -0.5, -1.0],
        "hello": [1.0, 0.0, 1.0],
    }
    assert scored.scores.dtype == torch.float32


def test_a_terms_own_parts_are_kept_under_its_name() -> None:
    inner = build(kind="combined", parts={"x": {"weight": 2.0, "reward": {"kind": "regex", "pattern": "x"}}})
    scored = CombinedReward({"outer": (10.0, inner)})(["p"], ["x"])
    assert scored.scores.tolist() == [20.0]
    assert {name: part.tolist() for name, part in scored.parts.items()} == {"outer": [2.0], "outer/x": [1.0]}


def test_a_fault_in_a_term_names_the_term() -> None:
    with pytest.raises(
        UserError, match=r"^reward\.parts\.fit\.reward\.function=math:sine: math has no 'sine'"
    ):
        build(kind="combined", parts={"fit": {"reward": {"kind": "function", "function": "math:sine"}}})


def test_a_sum_that_overflows_is_refused() -> None:
    def huge(prompts: list[str], responses: list[str]) -> Scores:
        return Scores(torch.full((len(responses),), 3e38), {})

    with pytest.raises(UserError, match="must fit float32"):
        CombinedReward({"a": (1.0, huge), "b": (1.0, huge)})(["p"], ["r"])


def test_a_learned_reward_needs_a_backbone() -> None:
    with pytest.raises(UserError, match=r"reward\.kind=learned needs a backbone"):
        build(kind="learned")
