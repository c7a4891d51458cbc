"""Files that a killed run leaves whole: written beside, synced, then renamed over the old one."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Put a finished file in place of another: at any moment a reader finds the old or the new one, whole."""
    sync(temporary)
    os.replace(temporary, final)
    sync(final.parent)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file at once, or leave the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    publish(temporary, path)


def full(error: OSError) -> str | None:
    """What a person is told where a file could not be written for want of room; None for other troubles."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return f"the disk is full ({error.strerror})"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file at once; NaN and infinities, which JSON has not, become null."""
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def complete_lines(path: Path) -> list[str]:
    """The lines of a file that end in a newline: one torn by a kill is left out."""
    if not path.exists():
        return []
    # Only "\n" ends a line here: str.splitlines would also cut at characters inside a model's answer.
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
