"""What a run shows and leaves behind, one callback a file."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback

from rlhf_lightning.callbacks.before_after import BeforeAfter
from rlhf_lightning.callbacks.checkpoint import Checkpoints
from rlhf_lightning.callbacks.evaluation import EvaluationCallback
from rlhf_lightning.callbacks.guard import Guard, watched_parts
from rlhf_lightning.callbacks.held_out import HeldOut
from rlhf_lightning.callbacks.interrupt import Interrupt
from rlhf_lightning.callbacks.metrics import Metrics
from rlhf_lightning.callbacks.progress import Progress
from rlhf_lightning.callbacks.samples import Samples
from rlhf_lightning.callbacks.summary import Summary, write_failure
from rlhf_lightning.callbacks.throughput import Throughput
from rlhf_lightning.config.schema import Config

__all__ = [
    "BeforeAfter",
    "Checkpoints",
    "EvaluationCallback",
    "Guard",
    "HeldOut",
    "Interrupt",
    "Metrics",
    "Progress",
    "Samples",
    "Summary",
    "Throughput",
    "build_callbacks",
    "write_failure",
]


def build_callbacks(config: Config, run_dir: Path, *, resume_from: int = 0) -> list[Callback]:
    """The callbacks of a run, in the order in which they must run.

    BeforeAfter precedes Throughput, whose clock it must not run into; Throughput completes the metrics that
    all the others read; EvaluationCallback adds to them, outside that clock; Guard judges them, and may tell
    all behind it that this iteration is the last; EvaluationCallback, Samples and HeldOut hand tables and a
    picture to the tracker before Metrics closes the point; Summary reads Metrics' row; Checkpoints saves the
    state of them all, and Interrupt, which has none, hears signals until it has.

    ``resume_from``: the first iteration that this process will run, 0 for a new run.
    """
    own = config.callbacks
    metrics = Metrics(run_dir, resume_from=resume_from)
    callbacks: list[Callback] = []
    if own.show and config.stage.name == "ppo":
        callbacks.append(BeforeAfter(run_dir / "before_after.json", count=own.show, seed=config.seed))
    callbacks.append(Throughput())
    if config.evaluate.every and config.stage.name == "ppo":
        callbacks.append(EvaluationCallback(run_dir, config))
    guard = None
    if config.stage.name == "ppo":
        guard = Guard(config.guard, watched=watched_parts(config.reward))
        callbacks.append(guard)
        samples = Samples(
            run_dir / "samples.jsonl",
            count=own.samples,
            responses=config.ppo.responses,
            seed=config.seed,
            table_every=own.sample_table_every,
            resume_from=resume_from,
        )
        callbacks.append(samples)
    if config.stage.name == "reward":
        callbacks.append(HeldOut(run_dir))
    callbacks += [
        metrics,
        Summary(run_dir / "summary.json", metrics=metrics, objective=config.target, guard=guard),
        Progress(live=own.progress),
        Checkpoints(run_dir, objective=config.target, every=own.checkpoint_every, resume_from=resume_from),
        Interrupt(),
    ]
    return callbacks
