"""Our side's prompts."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.race.subjects import questions


def write_prompts(path: Path, count: int) -> Path:
    """One prompt a line, as JSON."""
    rows = (json.dumps({"prompt": text}) + "\n" for text in questions(count))
    path.write_text("".join(rows), encoding="utf-8")
    return path
