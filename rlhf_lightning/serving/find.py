"""Which reward model a path leads to, and on which backbone it was trained; no weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.locate import locate, read_settings
from rlhf_lightning.config.resume import RESOLVED
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError

KEY = "RUN"  # what the command calls its first word
TINY = ModelConfig(name="tiny", path="tiny", dtype="float32")  # as conf/model/tiny.yaml


@dataclass(frozen=True)
class RewardFolder:
    """A reward adapter with its score head, and the backbone that it sits on."""

    adapter: str
    """Folder, or ``tiny``."""
    model: ModelConfig
    text: str
    """One line for a person."""


def find_reward_model(path: str, *, base: str | None = None) -> RewardFolder:
    """Look where ``path`` leads; an adapter on the hub is fetched.

    Args:
        path: a run of ``stage=reward``, the folder or hub id of a reward adapter, or ``tiny``.
        base: folder or hub id of the backbone, where it is not the one that run or adapter names.

    Raises:
        UserError: there is no reward model, or nothing says what it was trained on.
    """
    found = locate(path, key=KEY, want="reward")
    if found.kind == "tiny":
        return RewardFolder("tiny", TINY, found.text)
    if found.kind == "hub":
        from rlhf_lightning.models.adapters import find_adapter

        found = locate(str(find_adapter(path, key=KEY, want="reward")), key=KEY, want="reward")
    folder = Path(found.folder).absolute()
    run = folder.parents[1]
    if folder.parent.name == "adapters" and (run / RESOLVED).is_file():
        model = _trained_on(run, path)
        if base is not None:
            model = model.model_copy(update={"path": base})
    else:
        model = _alone(base or found.base, path)
    return RewardFolder(str(folder), model, found.text)


def _trained_on(run: Path, path: str) -> ModelConfig:
    settings = read_settings(run, f"{KEY}={path}")
    try:
        return ModelConfig.model_validate(settings.get("model"))
    except ValidationError:
        raise UserError(f"{KEY}={path}: section model of {RESOLVED} is not that of a run") from None


def _alone(base: str | None, path: str) -> ModelConfig:
    """A backbone chosen by its path alone: nf4 and bfloat16, the defaults of training."""
    if base is None:
        raise UserError(f"{KEY}={path} does not say which model it was trained on: give --model")
    return TINY if base in ("tiny", str(tiny_path("model"))) else ModelConfig(name=Path(base).name, path=base)
