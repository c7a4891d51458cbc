"""Where files outside the run folder live."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder for this project; named, not made.

    ``$XDG_CACHE_HOME/rlhf_lightning``, or ``~/.cache/rlhf_lightning`` where the variable is empty or
    relative (the XDG Base Directory specification asks for relative paths to be ignored).
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "rlhf_lightning"
