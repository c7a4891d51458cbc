"""``resume=FOLDER``, ``run=FOLDER``: the settings of an earlier run, plus what the command line changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_lightning.config.describe import nearest
from rlhf_lightning.errors import UserError

RESOLVED = "config_resolved.yaml"


@dataclass(frozen=True)
class Resumed:
    """An earlier run: its folder, and the settings that it was started with."""

    folder: Path
    values: dict[str, Any]


def split(tokens: list[str], key: str = "resume") -> tuple[str | None, list[str]]:
    """Take ``resume=...``, or another key, out of the overrides.

    Returns:
        What was given, or None; and the other overrides.
    """
    given, others = None, []
    for token in tokens:
        name, equals, value = token.lstrip("+").partition("=")
        if name == key and equals and value != "null":
            given = value.strip("'\"")
        else:
            others.append(token)
    return given, others


def load(given: str, *, launch: Path, key: str = "resume") -> Resumed:
    """Read an earlier run.

    Args:
        given: the run folder, its ``checkpoints`` or ``adapters`` folder, or something in one of these.
        launch: folder from which the command was started; the nearest run is looked for below it.
        key: the setting that names it, for messages.
    Raises:
        UserError: where there is no run.
    """
    folder = Path(os.path.abspath(os.path.expanduser(given)))
    if folder.name == "last.ckpt":
        folder = folder.parent
    if folder.parent.name == "adapters":
        folder = folder.parent
    if folder.name in ("checkpoints", "adapters"):
        folder = folder.parent
    if not (folder / RESOLVED).is_file():
        what = "is not there" if not folder.exists() else f"is no run: it holds no {RESOLVED}"
        near = _nearest_run(folder, launch)
        hint = f"; the nearest run is {near}" if near else f"; there is no run below {launch}"
        raise UserError(f"{key}={given or '(nothing)'} {what}{hint}")
    try:
        values = yaml.safe_load((folder / RESOLVED).read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise UserError(f"{key}={given}: {RESOLVED} cannot be read: {' '.join(str(e).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{key}={given}: {RESOLVED} holds no settings")
    return Resumed(folder, values)


def _nearest_run(wanted: Path, launch: Path) -> Path | None:
    runs = list(dict.fromkeys(_runs(wanted, launch)))
    if not runs:
        return None
    alike = nearest(str(wanted), map(str, runs))
    inside = [run for run in runs if wanted in run.parents or run in wanted.parents]
    return inside[0] if inside else Path(alike) if alike else max(runs, key=lambda run: run.stat().st_mtime)


def _runs(wanted: Path, launch: Path) -> Iterator[Path]:
    yield from (parent for parent in wanted.parents if (parent / RESOLVED).is_file())
    for base in (wanted, launch / "outputs", launch / "multirun"):
        if base.is_dir():
            for depth in ("*", "*/*", "*/*/*"):
                yield from (found.parent for found in base.glob(f"{depth}/{RESOLVED}"))
