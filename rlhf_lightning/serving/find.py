"""Where a reward model lies, and on which backbone; nothing is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from rlhf_lightning.config.resume import RESOLVED
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError

TINY = ModelConfig(name="tiny", path="tiny", dtype="float32")
ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Found:
    """A reward adapter with its score head, and the backbone that it was trained on."""

    adapter: str
    """Folder, or ``tiny``."""
    model: ModelConfig


def find_reward_model(path: str, *, base: str | None = None) -> Found:
    """Look where ``path`` leads.

    Args:
        path: a run folder of ``stage=reward``, the folder of a reward adapter, or ``tiny``.
        base: folder or hub id of the backbone, where it is not the one that run or adapter names.

    Raises:
        UserError: there is no reward model.
    """
    if path == "tiny":
        return Found("tiny", TINY)
    folder = Path(path).expanduser().absolute()
    if (folder / RESOLVED).is_file():
        return _in_run(folder, folder / "adapters" / "reward", path, base)
    if (folder / ADAPTER).is_file():
        if folder.parent.name == "adapters" and (folder.parents[1] / RESOLVED).is_file():
            return _in_run(folder.parents[1], folder, path, base)
        return Found(str(folder), _bare(folder, path, base))
    what = f"holds neither {RESOLVED} nor {ADAPTER}" if folder.is_dir() else "is no folder"
    raise UserError(
        f"RUN={path!r} {what}: give the folder of a run of stage=reward, that of a reward adapter, or tiny"
    )


def _in_run(run: Path, adapter: Path, path: str, base: str | None) -> Found:
    try:
        settings = yaml.safe_load((run / RESOLVED).read_text(encoding="utf-8"))
        model = ModelConfig.model_validate(settings["model"])
        stage = settings["stage"]["name"]
    except (yaml.YAMLError, ValidationError, UnicodeError, KeyError, TypeError):
        raise UserError(f"RUN={path!r}: {RESOLVED} in it is not the settings of a run") from None
    if not (adapter / ADAPTER).is_file():
        why = "has saved none yet" if stage in ("reward", "pipeline") else "trains none"
        raise UserError(f"RUN={path!r} holds no reward model (adapters/reward): a run of stage={stage} {why}")
    return Found(str(adapter), model if base is None else model.model_copy(update={"path": base}))


def _bare(folder: Path, path: str, base: str | None) -> ModelConfig:
    """A backbone as ``model.path`` alone would choose it: nf4 and bfloat16."""
    if base is None:
        try:
            base = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
        except (ValueError, KeyError, TypeError):
            base = None
        if not base:
            raise UserError(f"RUN={path!r} does not say which model it was trained on: give --model")
        beside = folder / base  # relative to the adapter, as it may be written
        base = str(beside) if beside.is_dir() else base
    return ModelConfig(name=Path(base).name, path=base)
