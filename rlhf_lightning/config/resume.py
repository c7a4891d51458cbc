"""``resume=FOLDER``: the settings of an earlier run, plus what the command line changes."""

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
    """A run to continue: its folder, and the settings that it was started with."""

    folder: Path
    values: dict[str, Any]


def split(tokens: list[str]) -> tuple[str | None, list[str]]:
    """Take ``resume=...`` out of the overrides.

    Returns:
        What was given, or None; and the other overrides.
    """
    given, others = None, []
    for token in tokens:
        key, equals, value = token.lstrip("+").partition("=")
        if key == "resume" and equals and value != "null":
            given = value.strip("'\"")
        else:
            others.append(token)
    return given, others


def load(given: str, *, launch: Path) -> Resumed:
    """Read the run to continue.

    Args:
        given: the run folder, its ``checkpoints`` folder or its ``last.ckpt``.
        launch: folder from which the command was started; the nearest run is looked for below it.
    Raises:
        UserError: where there is no run.
    """
    folder = Path(os.path.abspath(os.path.expanduser(given)))
    if folder.name == "last.ckpt":
        folder = folder.parent
    if folder.name == "checkpoints":
        folder = folder.parent
    if not (folder / RESOLVED).is_file():
        what = "is not there" if not folder.exists() else f"is no run: it holds no {RESOLVED}"
        near = _nearest_run(folder, launch)
        hint = f"; the nearest run is {near}" if near else f"; there is no run below {launch}"
        raise UserError(f"resume={given or '(nothing)'} {what}{hint}")
    try:
        values = yaml.safe_load((folder / RESOLVED).read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise UserError(f"resume={given}: {RESOLVED} cannot be read: {' '.join(str(e).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"resume={given}: {RESOLVED} holds no settings")
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
