"""One run, from a validated config to a closed tracker."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path

import torch
import transformers

from rlhf_lightning.build import build_parts, build_trainer
from rlhf_lightning.config.schema import Config
from rlhf_lightning.console import make_console, print_end, print_plan
from rlhf_lightning.errors import UserError
from rlhf_lightning.tracking import close_trackers


def run(config: Config, output_dir: Path) -> float | None:
    """Train, or examine the set-up with ``doctor=true``.

    Returns:
        The last value of ``config.objective``, which a sweep reads; None for the doctor.

    Raises:
        UserError: something the user can mend.
        SystemExit: with code 1, where the doctor finds a fault.
    """
    quiet()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    console = make_console()
    with console.status(f"Loading {config.model.name} ..."):
        parts = build_parts(config)
    print_plan(console, config, roles=parts.module.actor_critic.weights())
    if config.doctor:
        from rlhf_lightning.doctor import examine

        raise SystemExit(0 if examine(parts, console) else 1)
    exit_code = 1
    try:
        checkpoint = last_checkpoint(output_dir) if config.resume else None
        trainer = build_trainer(config, output_dir, start=saved_iteration(checkpoint))
        trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True)
        exit_code = 1 if trainer.interrupted else 0
    finally:
        close_trackers(exit_code)
    if trainer.interrupted:
        raise KeyboardInterrupt
    print_end(console, output_dir, config)
    value = parts.module.metrics.get(config.objective)
    if value is None:
        raise UserError(f"objective={config.objective!r} names no metric of this run; see the columns of metrics.csv")
    return value


def last_checkpoint(run_dir: Path) -> Path:
    """Where a run folder continues from."""
    path = run_dir / "checkpoints" / "last.ckpt"
    if not path.exists():
        raise UserError(f"resume={run_dir}: there is no checkpoints/last.ckpt in it to continue from")
    return path


def saved_iteration(checkpoint: Path | None) -> int:
    """Iterations that a checkpoint holds; 0 without one."""
    if checkpoint is None:
        return 0
    return torch.load(checkpoint, map_location="cpu", weights_only=True)["ppo"]["counters"]["iteration"]


def quiet() -> None:
    """Leave the terminal to the run: libraries speak only when something is wrong."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
