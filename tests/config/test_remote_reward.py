"""``reward=http`` on the command line, judged before anything is written."""

from pathlib import Path

import pytest

from rlhf_lightning.config.arguments import parse
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import plan
from rlhf_lightning.config.rewards import HTTPRewardConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def judge(*line: str) -> Config:
    flags = parse(list(line))
    return plan(Command(ROOT / "conf", flags.tokens, "config", flags.multirun, flags.folders)).jobs[0]


def complaint(*line: str) -> str:
    with pytest.raises(UserError) as caught:
        judge(*line)
    return str(caught.value)


def test_it_composes() -> None:
    reward = judge("reward=http", "reward.url='https://host:8000/score?v=2'", "reward.retries=0").reward
    assert isinstance(reward, HTTPRewardConfig)
    assert reward.url == "https://host:8000/score?v=2" and reward.retries == 0


def test_the_address_is_required_and_has_a_form() -> None:
    assert complaint("reward=http") == (
        "reward.url is required (http://HOST:PORT/PATH, where batches are posted): give reward.url=VALUE"
    )
    assert complaint("reward=http", "reward.url=host:8000").startswith(
        "reward.url must be of the form http://HOST:PORT/PATH"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["reward=http", "reward.url=http://me:s3cret@host/score"],
        [
            "reward=combined",
            "reward.parts.far.weight=1",
            "reward.parts.far.reward.kind=http",
            "reward.parts.far.reward.url=http://me:s3cret@host/score",
        ],
    ],
    ids=["single", "part"],
)
def test_a_login_is_refused_before_the_settings_are_written(words: list[str]) -> None:
    text = complaint(*words)
    assert ".url must not hold user:password, since the run folder keeps every setting in plain text" in text
    assert "s3cret" not in text


def test_a_token_is_no_setting() -> None:
    text = complaint("reward=http", "reward.url=http://host/${oc.env:RLHF_REWARD_TOKEN}")
    assert "reward.url must not take ${oc.env:RLHF_REWARD_TOKEN}" in text
