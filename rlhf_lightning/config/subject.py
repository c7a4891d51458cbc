"""The trained model that a command such as export or chat is about, found before torch is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_lightning.config.locate import ADAPTER, SCORE_HEAD, Want, locate, read_settings, run_of
from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.config.schema import Config, ModelConfig
from rlhf_lightning.errors import UserError


@dataclass(frozen=True)
class Subject:
    """What was trained, on which backbone, and how."""

    path: str
    """As it was given."""
    text: str
    """What was found there, for a person."""
    model: ModelConfig
    """The backbone, stored and computed as in training."""
    adapter: str | None
    """Folder or hub id of the trained adapter; None: a whole model without one."""
    judges: bool = False
    """Whether the adapter is a reward model, with a score head, and no policy."""
    run: Path | None = None
    config: Config | None = None
    """Settings of the run; None where it is no run of this project."""

    @property
    def learned_reward(self) -> str | None:
        """Path of the reward adapter that the run learned from; None: it had none."""
        singles = self.config.single_rewards.values() if self.config is not None and self.rolled else ()
        return next((one.path for one in singles if isinstance(one, LearnedRewardConfig)), None)

    @property
    def rolled(self) -> bool:
        """Whether a reward took part in the training at all."""
        return self.config is not None and self.config.stage.name == "ppo"

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary.json; empty where there is none."""
        path = self.run / "summary.json" if self.run is not None else None
        return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


def find_subject(path: str, *, key: str = "RUN", base: str | None = None) -> Subject:
    """Look where ``path`` leads.

    Args:
        path: a run folder, a folder or hub id of an adapter, a folder of a whole model, or ``tiny``.
        key: its name in messages.
        base: folder or hub id of the backbone, where it is not the one that run or adapter names.

    Raises:
        UserError: there is nothing trained, or its backbone is not known.
    """
    place = Path(path).expanduser()
    inside = place.parents[1] if place.parent.name == "adapters" else place  # RUN/adapters/policy
    run = run_of(inside) if path != "tiny" and inside.is_dir() else None
    if run is not None:
        config = read_config(run, f"{key}={path}")
        model = config.model if base is None else config.model.model_copy(update={"path": base})
        want: Want = "reward" if config.stage.name == "reward" else "policy"
        found = locate(path, key=key, want=want)
        return Subject(path, found.text, model, found.folder, want == "reward", run, config)
    if path == "tiny" or ((place / "config.json").is_file() and not (place / ADAPTER).is_file()):
        found = locate(path, key=key, want="model")
        return Subject(path, found.text, _bare(path), None)
    judges = (place / SCORE_HEAD).is_file()
    found = locate(path, key=key, want="reward" if judges else "policy")
    base = base or found.base
    if base is None:
        raise UserError(f"{key}={path} does not say which model it was trained on: give --model")
    return Subject(path, found.text, _bare(base), found.folder, judges)


def read_config(run: Path, at: str) -> Config:
    """The settings of a run, judged by the schema alone: what they name may have moved since.

    Raises:
        UserError: they are not those of this version; ``at`` begins the sentence.
    """
    try:
        return Config.model_validate(read_settings(run, at))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{at} was made with other settings than this version knows: {where}: {first['msg']}"
        ) from None


def _bare(path: str) -> ModelConfig:
    """A backbone as ``model.path`` alone would choose it."""
    return ModelConfig(name=Path(path).name, path=path)
