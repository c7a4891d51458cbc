"""Settings of the rewards, a kind for each."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rlhf_lightning.config.section import Section


class LearnedRewardConfig(Section):
    """A reward adapter and score head on the policy's own backbone."""

    kind: Literal["learned"] = Field(description="a reward adapter on the policy's backbone")
    path: str = Field(
        "tiny", description="folder of a reward adapter with its score head; tiny: the embedded one"
    )
    batch_size: int = Field(32, ge=1, description="answers in one forward pass")


class ClassifierRewardConfig(Section):
    """A separate frozen sequence classifier with its own tokenizer, fed text."""

    kind: Literal["classifier"] = Field(description="a separate sequence classifier")
    path: str = Field(description="folder or hub id of a sequence classifier")
    label: int = Field(-1, description="which logit is the score; a single logit is taken as it is")
    probability: bool = Field(False, description="softmax or sigmoid of the logits instead of the logit")
    response_only: bool = Field(False, description="judge the answer alone, without its prompt")
    max_length: int = Field(512, ge=1, description="tokens; the end is kept")
    batch_size: int = Field(32, ge=1, description="answers in one forward pass")


class FunctionRewardConfig(Section):
    """A Python function: lists of prompts and responses in, one float for each out."""

    kind: Literal["function"] = Field(description="a Python function")
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$", description="package.module:name")
    timeout_s: float = Field(60.0, gt=0, description="seconds for one batch before the run stops")


class LengthRewardConfig(Section):
    """Minus the distance of the answer's length from a target, as a share of the target."""

    kind: Literal["length"] = Field(description="closeness to a number of words")
    target: int = Field(ge=1, description="words")


class HTTPRewardConfig(Section):
    """A server that scores: prompts and responses out as JSON, scores back; see docs/remote_rewards.md."""

    kind: Literal["http"] = Field(description="a server that scores")
    url: str = Field(pattern=r"^https?://\S+$", description="http://HOST:PORT/PATH, where batches are posted")
    batch_size: int = Field(64, ge=1, description="answers in one request")
    timeout_s: float = Field(60.0, gt=0, description="seconds for one request")
    retries: int = Field(4, ge=0, description="further tries after a failure that may pass")
    backoff_s: float = Field(
        1.0, ge=0, description="seconds before the first of them, doubled at each up to a minute"
    )

    @property
    def url_fault(self) -> str | None:
        """What is wrong with the address, in words that do not repeat it; None: nothing."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as e:
            return f"is no address ({e})"
        if "@" in parts.netloc:
            return (
                "must not hold user:password, since the run folder keeps every setting in plain text: "
                "leave the login out, and give a token in the environment, RLHF_REWARD_TOKEN"
            )
        return None if parts.hostname and port != 0 else "names no host"


class RegexRewardConfig(Section):
    """1 where the pattern is found in the answer, 0 elsewhere."""

    kind: Literal["regex"] = Field(description="whether a pattern is found")
    pattern: str = Field(min_length=1, description="Python regular expression")
    full: bool = Field(False, description="the whole answer must match")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ValueError(f"a Python regular expression ({e})") from None
        return pattern


SingleReward = Annotated[
    LearnedRewardConfig
    | ClassifierRewardConfig
    | FunctionRewardConfig
    | LengthRewardConfig
    | RegexRewardConfig
    | HTTPRewardConfig,
    Field(discriminator="kind"),
]


class RewardPart(Section):
    """One term of a combined reward."""

    weight: float = Field(1.0, description="factor of this term")
    reward: SingleReward = Field(description="any reward but a combined one")


class CombinedRewardConfig(Section):
    """A weighted sum of rewards, each logged by its name."""

    kind: Literal["combined"] = Field(description="a weighted sum of rewards")
    parts: dict[str, RewardPart] = Field(min_length=1, description="name -> weight and reward")


RewardConfig = Annotated[
    LearnedRewardConfig
    | ClassifierRewardConfig
    | FunctionRewardConfig
    | LengthRewardConfig
    | RegexRewardConfig
    | HTTPRewardConfig
    | CombinedRewardConfig,
    Field(discriminator="kind"),
]
