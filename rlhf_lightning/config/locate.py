"""What a path leads to: a run folder of this project, a PEFT folder, a Transformers folder or a hub id.

Told by the files that lie there, before torch is loaded: ``config_resolved.yaml`` makes a run,
``adapter_config.json`` an adapter, ``config.json`` a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.resume import RESOLVED
from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

Want = Literal["policy", "reward", "model"]
Kind = Literal["run", "adapter", "model", "hub", "tiny"]

ADAPTER = "adapter_config.json"
SCORE_HEAD, VALUE_HEAD = "score_head.safetensors", "value_head.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # models from before owners, such as gpt2
_SHAPE = ("model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "vocab_size")


@dataclass(frozen=True)
class Found:
    """What a path leads to."""

    kind: Kind
    folder: str
    """What to load: the adapter's or the model's folder; a hub id as given."""
    base: str | None
    """Model that an adapter sits on: ``model.path`` of its run, or what PEFT wrote down; None: not known."""
    text: str
    """One line for a person."""


def locate(path: str, *, key: str, want: Want) -> Found:
    """Tell what ``path`` is and where in it the wanted part lies.

    Args:
        path: run folder, PEFT folder, Transformers folder, hub id, or ``tiny``.
        key: the setting that names it, for messages.
        want: an adapter that speaks, an adapter that judges with its score head, or a whole model.

    Raises:
        UserError: it is not there, or holds something else; the sentence says what.
    """
    at = f"{key}={path}"
    if path == "tiny":
        if want == "policy":
            raise UserError(f"{at}: there is no embedded policy adapter; leave {key} empty to start fresh")
        embedded = tiny_path("model" if want == "model" else "reward")
        base = None if want == "model" else "tiny"
        return Found("tiny", str(embedded), base, f"{key}: the embedded {_NAMES[want]}")
    place = Path(path).expanduser()
    if not place.exists():
        return _hub(path, key, want)
    if place.is_file():
        raise UserError(f"{at} is a file: name the folder that holds it, {key}={place.parent}")
    if (run := run_of(place)) is not None:
        return _run(run, at, key, want)
    if (place / ADAPTER).is_file():
        return _adapter(place, at, key, want)
    if (place / want / ADAPTER).is_file():
        return _adapter(place / want, at, key, want)
    if (place / "config.json").is_file():
        return _model(place, at, key, want)
    looked = f"{RESOLVED} (a run), {ADAPTER} (PEFT's format), config.json (a model in Transformers' format)"
    raise UserError(f"{at} is a folder with none of {looked}{_nearby(place)}")


def named_paths(c: Config) -> Iterator[tuple[str, str, Want]]:
    """(key, path, what is wanted there) of every model and adapter that a config names and uses.

    A ``model.path`` that is not there is left out: it may be on the hub, and loading tells.
    """
    if c.model.path == "tiny" or Path(c.model.path).expanduser().exists():
        yield "model.path", c.model.path, "model"
    if c.model.adapter is not None:
        yield "model.adapter", c.model.adapter, "policy"
    if c.stage.name in ("ppo", "evaluate"):
        for key, reward in c.single_rewards.items():
            if isinstance(reward, LearnedRewardConfig):
                yield f"{key}.path", reward.path, "reward"
    if c.stage.name == "evaluate":
        for key, path in (("run", c.run), ("evaluate.against", c.evaluate.against)):
            if path is not None:
                yield key, path, "policy"


_NAMES: dict[Want, str] = {
    "policy": "policy adapter",
    "reward": "reward adapter with its score head",
    "model": "model",
}


def run_of(place: Path) -> Path | None:
    """The run that a folder is, or is the ``adapters`` or ``checkpoints`` folder of."""
    run = place.resolve().parent if place.name in ("adapters", "checkpoints") else place
    return run if (run / RESOLVED).is_file() else None


def _hub(path: str, key: str, want: Want) -> Found:
    first = path.partition("/")[0]
    named = _HUB_ID.fullmatch(path) or (want == "model" and _HUB_NAME.fullmatch(path))
    if not named or (first != path and Path(first).exists()):
        hint = "" if named else ", and no hub id, OWNER/NAME, either"
        raise UserError(f"{key}={path}: there is no such folder{hint}")
    return Found("hub", path, None, f"{key}: {path} on the model hub")


# ---- run folders ----------------------------------------------------------------------------------


def _run(run: Path, at: str, key: str, want: Want) -> Found:
    settings = read_settings(run, at)
    stage = str(_inside(settings, "stage", "name") or "ppo")
    base = str(_inside(settings, "model", "path") or "tiny")
    if want == "model":
        raise UserError(
            f"{at} is a run (stage {stage}), not a whole model: use model.path={base} model.adapter={run}, "
            f"or export it first: python -m rlhf_lightning.export {run} --merge --to FOLDER"
        )
    if inside := sorted(p.parent.name for p in run.glob(f"*/{RESOLVED}")):
        raise UserError(f"{at} is a run of several stages: name one of them, {key}={run}/{'|'.join(inside)}")
    folder = run / "adapters" / want
    there = (folder / ADAPTER).is_file()
    status = _status(run, at, kept=(run / "adapters").is_dir())
    if not there:
        raise UserError(f"{at} {_holds_other(run, settings, stage, key, want)}")
    if want == "reward":
        _need_head(folder, at)
    text = f"{key}: run {run} (stage {stage}, {status}), its {_NAMES[want]}"
    return Found("run", str(folder), base, text)


def read_settings(run: Path, at: str) -> dict[str, Any]:
    """The settings that a run was started with.

    Raises:
        UserError: they cannot be read; ``at`` begins the sentence.
    """
    try:
        settings = yaml.safe_load((run / RESOLVED).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{at}: {RESOLVED} cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise UserError(f"{at}: {RESOLVED} holds no settings")
    return settings


def _status(run: Path, at: str, *, kept: bool) -> str:
    """How the run ended, in a few words; one that left nothing finished is refused."""
    path = run / "summary.json"
    if not path.is_file():
        named = f", or name {run / 'adapters'}/ROLE to take what it has" if kept else ""
        raise UserError(
            f"{at} is a run that never finished: it has no summary.json, so that it is still running or was "
            f"killed; continue it with python train.py resume={run}{named}"
        )
    summary = _json(path, at)
    status, error = str(summary.get("status")), summary.get("error")
    if status == "finished":
        return status
    if not kept:
        raise UserError(
            f"{at} is a run that never finished: it {_was(status)} and left no adapters{_why(error)}"
        )
    return (
        f"{status} after {summary.get('iterations', 0)} of {summary.get('total_iterations', '?')} iterations"
    )


def _was(status: str) -> str:
    return f"was {status}" if status == "interrupted" else "failed"


def _why(error: object) -> str:
    return f" ({str(error).splitlines()[0]})" if error else ""


def _holds_other(run: Path, settings: dict[str, Any], stage: str, key: str, want: Want) -> str:
    has = sorted(p.parent.name for p in (run / "adapters").glob(f"*/{ADAPTER}"))
    if want == "policy" and "reward" in has:
        return f"holds a reward model, not a policy: it is a run of stage={stage}; use reward.path={run}"
    if want == "reward" and "policy" in has:
        judge = (
            _inside(settings, "reward", "path") if _inside(settings, "reward", "kind") == "learned" else None
        )
        hint = f"; its own reward was reward.path={judge}" if judge else f"; use model.adapter={run}"
        return f"holds a policy, not a reward model: it is a run of stage={stage}{hint}"
    return f"is a run of stage={stage}, which left no {_NAMES[want]}"


# ---- folders of PEFT and Transformers -------------------------------------------------------------


def _adapter(folder: Path, at: str, key: str, want: Want) -> Found:
    base = _json(folder / ADAPTER, at).get("base_model_name_or_path")
    if base and (folder / str(base)).is_dir():  # as it may be written: relative to the adapter
        base = (folder / str(base)).resolve()
    if want == "model":
        on = f"model.path={base} " if base else ""
        raise UserError(f"{at} is an adapter, not a whole model: use {on}model.adapter={folder}")
    if want == "reward":
        _need_head(folder, at)
    else:
        for head, name in ((SCORE_HEAD, "reward model"), (VALUE_HEAD, "critic")):
            if (folder / head).is_file():
                raise UserError(f"{at} holds a {name}, not a policy: there is a {head} beside its adapter")
    text = f"{key}: {_NAMES[want]} {folder}" + (f", made for {base}" if base else "")
    return Found("adapter", str(folder), str(base) if base else None, text)


def _need_head(folder: Path, at: str) -> None:
    if not (folder / SCORE_HEAD).is_file():
        raise UserError(f"{at} holds an adapter but no {SCORE_HEAD}: it is not a reward model")


def _model(folder: Path, at: str, key: str, want: Want) -> Found:
    config = _json(folder / "config.json", at)
    kind = next(iter(config.get("architectures") or []), config.get("model_type", "unknown"))
    if want == "policy":
        raise UserError(f"{at} is a whole model ({kind}), not an adapter: use model.path={folder}")
    if want == "reward":
        raise UserError(
            f"{at} is a whole model ({kind}), not a reward adapter: "
            f"use reward=classifier reward.path={folder}"
        )
    return Found("model", str(folder), None, f"{key}: model {folder} ({kind})")


def refuse_another_shape(found: Found, model_path: str, *, at: str) -> None:
    """Compare the model that an adapter was made for with the one it is put on, where both are on this disk.

    Only what decides the tensors' shapes counts: one model may lie in many places.

    Raises:
        UserError: they are of different kinds or sizes.
    """
    if found.base is None:
        return
    theirs, ours = _config_of(found.base), _config_of(model_path)
    for name in _SHAPE:
        if theirs and ours and theirs.get(name) != ours.get(name):
            raise UserError(
                f"{at} was made for another model: {found.base} has {name}={theirs.get(name)}, "
                f"model.path={model_path} has {name}={ours.get(name)}"
            )


def _config_of(path: str) -> dict[str, Any] | None:
    file = (tiny_path("model") if path == "tiny" else Path(path).expanduser()) / "config.json"
    return _json(file, path) if file.is_file() else None


# ---- helpers --------------------------------------------------------------------------------------


def _json(path: Path, at: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{at}: {path.name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{at}: {path.name} holds no settings")
    return value


def _inside(settings: dict[str, Any], section: str, name: str) -> Any:
    part = settings.get(section)
    return part.get(name) if isinstance(part, dict) else None


def _nearby(place: Path) -> str:
    runs = [p.parent for depth in ("*", "*/*", "*/*/*") for p in place.glob(f"{depth}/{RESOLVED}")]
    return f"; the newest run in it is {max(runs, key=lambda run: run.stat().st_mtime)}" if runs else ""
