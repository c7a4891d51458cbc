"""Trackers: Weights & Biases (offline unless told otherwise) and TensorBoard, both on the iteration axis.

Whoever calls ``build_loggers`` calls ``close_trackers`` in a ``finally``: a W&B run left open would swallow
the next job of a sweep, and one closed without a code would count a failed job as finished.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rlhf_lightning.config.schema import Config, WandbConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.wandb_files import last_iteration

_MODES = {
    "offline": "offline",
    "dryrun": "offline",
    "online": "online",
    "run": "online",
    "disabled": "disabled",
}
_environment_added: set[str] = set()


class IterationWandbLogger(WandbLogger):
    """W&B whose x axis and step are the iteration: no point twice, none missing, in however many parts.

    Args:
        logged: the last iteration that earlier processes of this run have logged, -1 for none. It may lie
            behind the checkpoint, for W&B's own process writes late, or before it.
    """

    def __init__(self, *, logged: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self._logged = logged

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        iteration = int(metrics["iteration"])
        if iteration > self._logged:
            self.experiment.log(dict(metrics), step=iteration, commit=True)

    @rank_zero_only
    def catch_up(self, rows: list[dict[str, float]]) -> None:
        """Log those of the run's earlier rows that a killed process did not bring home."""
        for row in rows:
            self.log_metrics(row)

    @rank_zero_only
    def log_rows(self, name: str, rows: list[dict[str, Any]], *, iteration: int) -> None:
        """Show records as a new table, in the point of the history that ``log_metrics`` is about to close."""
        import wandb

        if iteration <= self._logged:
            return

        columns: list[str | int] = list(rows[0]) if rows else []
        table = wandb.Table(columns=columns, data=[list(row.values()) for row in rows])
        self.experiment.log({name: table}, step=iteration, commit=False)

    @rank_zero_only
    def log_picture(self, name: str, path: Path, *, iteration: int) -> None:
        """Show an image file, in the point of the history that ``log_metrics`` is about to close."""
        import wandb

        if iteration > self._logged:
            self.experiment.log({name: wandb.Image(str(path))}, step=iteration, commit=False)


def build_loggers(config: Config, run_dir: Path, *, resume_from: int = 0) -> list[Logger]:
    """The loggers that ``config.logger`` asks for, open, with the config already in them; none off rank zero.

    Args:
        resume_from: the first iteration of this process.
    Raises:
        UserError: W&B cannot be reached or knows no account, WANDB_MODE is no mode, or TensorBoard is not
        installed.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:
        return []
    loggers: list[Logger] = []
    if config.logger.tensorboard:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "logger.tensorboard=true needs TensorBoard, which is not installed: "
                "pip install 'rlhf-lightning[tensorboard]'"
            )
        # Points of a killed process from there on are hidden, for they come again.
        again: dict[str, Any] = {"purge_step": resume_from} if resume_from else {}
        loggers.append(TensorBoardLogger(save_dir=run_dir, name="tensorboard", version="", **again))
    if config.logger.wandb is not None:
        mode = _wandb_mode(config.logger.wandb)
        if mode != "disabled":
            loggers.append(_wandb_logger(config, config.logger.wandb, run_dir, mode))
    return loggers


def close_trackers(exit_code: int) -> None:
    """Finish this process's W&B run, if there is one; ``exit_code`` 0 marks it finished, any other failed.

    Trouble in closing is a warning: it must not hide the error that ended the job.
    """
    wandb = sys.modules.get("wandb")  # not imported: nothing to close, and a second saved
    try:
        if wandb is not None and wandb.run is not None:
            wandb.finish(exit_code=exit_code)
    except Exception as error:
        warnings.warn(f"the W&B run did not close cleanly: {error}", stacklevel=2)
    finally:
        for name in _environment_added:
            os.environ.pop(name, None)
        _environment_added.clear()


def _wandb_mode(config: WandbConfig) -> str:
    chosen = os.environ.get("WANDB_MODE") or config.mode
    if chosen not in _MODES:
        raise UserError(f"WANDB_MODE must be one of {', '.join(_MODES)}; it is {chosen!r}")
    return _MODES[chosen]


def _wandb_logger(config: Config, settings: WandbConfig, run_dir: Path, mode: str) -> IterationWandbLogger:
    import wandb

    folder = run_dir / "wandb"
    folder.mkdir(parents=True, exist_ok=True)  # W&B moves to the temporary folder where this one is missing
    # W&B also stages tables in the home folder; a run writes in its own folder only.
    for name, value in (("WANDB_DATA_DIR", folder / "data"), ("WANDB_CACHE_DIR", folder / "cache")):
        if name not in os.environ:
            os.environ[name] = str(value)
            _environment_added.add(name)
    try:
        with _no_input(), _no_staged_inputs():
            run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=settings.name,
                tags=settings.tags,
                config=config.model_dump(mode="json"),
                dir=str(run_dir),
                id=_run_id(run_dir / "wandb_run_id.txt"),
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                reinit="finish_previous",
                settings=wandb.Settings(silent=True, console="off", init_timeout=30),
            )
    except wandb.errors.Error as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"logger.wandb.mode={mode} failed: {reason} Online needs a network and an account "
            "(set WANDB_API_KEY or run `wandb login`); logger.wandb.mode=offline needs neither."
        ) from error
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")
    logged = last_iteration(run_dir, run.id)
    if mode == "online" and run.resumed:
        logged = max(logged, int(run.summary.get("iteration", -1)))
    return IterationWandbLogger(
        logged=logged, experiment=run, project=settings.project, save_dir=str(run_dir), id=run.id
    )


def _run_id(path: Path) -> str:
    """The id of this folder's run, kept so that a resumed run is the same one."""
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


@contextlib.contextmanager
def _no_input() -> Iterator[None]:
    """Without a terminal to read from, W&B raises where it would ask for a key and wait."""
    terminal = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = terminal


@contextlib.contextmanager
def _no_staged_inputs() -> Iterator[None]:
    """W&B looks for inputs staged by its Launch package, whose import takes a second or more.

    Only that package can have staged any: where nobody has imported it, there is nothing to look for.
    """
    from wandb.sdk.wandb_run import Run

    name = "_detect_and_apply_job_inputs"  # private: where it is gone, so is what it costs
    look = getattr(Run, name, None)
    if look is None or "wandb.sdk.launch" in sys.modules:
        yield
        return
    setattr(Run, name, lambda run: None)
    try:
        yield
    finally:
        setattr(Run, name, look)
