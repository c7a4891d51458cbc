"""One run, from a validated config to a closed tracker."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback

from rlhf_lightning import loading
from rlhf_lightning.build import Parts, build_parts, build_trainer
from rlhf_lightning.callbacks import Guard, write_failure
from rlhf_lightning.callbacks.files import full
from rlhf_lightning.callbacks.saved import last_checkpoint
from rlhf_lightning.config.schema import Config
from rlhf_lightning.console import make_console, print_end, print_plan
from rlhf_lightning.data.datamodule import PromptDataModule
from rlhf_lightning.errors import Interrupted, Signalled, Stopped, UserError
from rlhf_lightning.evaluation import evaluate_run
from rlhf_lightning.stages.ppo import PPO
from rlhf_lightning.tracking import close_trackers


def run(config: Config, output_dir: Path) -> float | None:
    """Train, or examine the set-up with ``doctor=true``.

    Returns:
        The last value of the objective, more is better, which a sweep reads; None for the doctor.

    Raises:
        UserError: something the user can mend.
        Stopped: the guard ended the training; everything is saved.
        SystemExit: with code 1, where the doctor finds a fault.
    """
    quiet()
    try:
        return _run(config, output_dir)
    except (Exception, KeyboardInterrupt) as error:
        write_failure(output_dir, error)
        if isinstance(error, OSError) and (reason := full(error)):
            raise UserError(f"{reason}: make room, then continue with resume={output_dir}") from error
        raise


def _run(config: Config, output_dir: Path) -> float | None:
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    console = make_console()
    if config.stage.name == "evaluate":
        return _objective(evaluate_run(config, output_dir, console), config)
    with console.status(f"Loading {config.model.name} ..."):
        parts = build_parts(config)
    print_plan(console, config, roles=parts.module.actor_critic.weights(), data=parts.data.report)
    if config.doctor:
        from rlhf_lightning.doctor import examine

        assert isinstance(parts.module, PPO) and isinstance(parts.data, PromptDataModule)
        raise SystemExit(0 if examine(parts.module, parts.data, console) else 1)
    stopped = fit(parts, config, output_dir)
    print_end(console, output_dir, config)
    if stopped:
        raise Stopped(f"{stopped}; everything is saved: resume={output_dir} guard.action=warn goes on")
    return _objective(parts.module.metrics, config)


def _objective(metrics: dict[str, float], config: Config) -> float | None:
    name, sign = config.target
    return sign * metrics[name] if name in metrics else None


def fit(parts: Parts, config: Config, output_dir: Path) -> str | None:
    """Train from the start or the run folder's last checkpoint; trackers are closed whatever happens.

    Returns:
        Why the guard ended the training early, None where it did not.
    """
    checkpoint = None
    if config.resume:
        every = config.callbacks.checkpoint_every
        checkpoint = last_checkpoint(output_dir, stage=config.stage.name, every=every)
        if checkpoint is None:
            make_console().print(f"{output_dir} has no checkpoint yet: it begins again", markup=False)
    exit_code = 1
    try:
        trainer = build_trainer(
            config,
            output_dir,
            iterations=parts.module.total_iterations,
            start=checkpoint.iteration if checkpoint else 0,
        )
        path = checkpoint.path if checkpoint else None
        try:
            trainer.fit(parts.module, datamodule=parts.data, ckpt_path=path, weights_only=True)
        except Signalled as error:
            raise Interrupted(error.number) from error
        except SystemExit as error:  # Lightning turns a second Ctrl-C into an exit of the whole process
            raise Interrupted() from error
        every_callback: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        guards = [callback for callback in every_callback if isinstance(callback, Guard)]
        stopped = guards[0].stopped if guards else None
        exit_code = Stopped.exit_code if stopped else 0
        return stopped
    finally:
        close_trackers(exit_code)


def quiet() -> None:
    """Leave the terminal to the run: libraries speak only when something is wrong."""
    loading.quiet()
    for name in ("lightning.pytorch", "lightning.fabric", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=".*Could not find a config file")
