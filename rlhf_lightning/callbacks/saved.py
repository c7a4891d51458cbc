"""Reading back what ``Checkpoints`` wrote, and refusing what it did not."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_lightning.callbacks.files import complete_lines
from rlhf_lightning.errors import UserError


@dataclass(frozen=True)
class Saved:
    """A checkpoint that can be continued."""

    path: Path
    iteration: int
    """Iterations that are finished in it: the number of the first one to run."""


def last_checkpoint(run_dir: Path, *, stage: str, every: int) -> Saved | None:
    """Where a run folder continues from; None where it was killed before its first checkpoint.

    Args:
        stage: the one that is about to read it.
        every: iterations between two checkpoints.
    Raises:
        UserError: it is gone, damaged, or another program's or stage's.
    """
    path = run_dir / "checkpoints" / "last.ckpt"
    if not path.exists():
        if (rows := max(0, len(complete_lines(run_dir / "metrics.csv")) - 1)) > every:
            raise UserError(
                f"resume={run_dir}: there is no checkpoints/last.ckpt in it to continue from, "
                f"though metrics.csv has {rows} iterations: put a copy back, or start a new run"
            )
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load compares no checksums
            if broken := archive.testzip():
                raise ValueError(f"{broken} has changed since it was written")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn file raises whatever its reader happens to meet first
        reason = " ".join(str(error).split(". ")[0].split())[:200] or type(error).__name__
        raise UserError(
            f"resume={run_dir}: checkpoints/last.ckpt is damaged and nothing of it was used ({reason}); "
            "put a copy back, or checkpoints/best.ckpt under its name"
        ) from None
    about = checkpoint.get("stage") if isinstance(checkpoint, dict) else None
    if not isinstance(about, dict) or "counters" not in about:
        raise UserError(f"resume={run_dir}: checkpoints/last.ckpt was not written by rlhf_lightning")
    if about.get("name") != stage:
        other = about.get("name")
        raise UserError(
            f"resume={run_dir}: checkpoints/last.ckpt was written by stage={other}, not stage={stage}"
        )
    return Saved(path, about["counters"]["iteration"])
