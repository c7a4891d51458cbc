"""What a person watches while it runs: two live bars on a terminal, one plain line an iteration elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from rlhf_lightning.callbacks.contract import iterating
from rlhf_lightning.console import make_console

RECENT = 10  # iterations whose median is the forecast of the next

_FIGURES = (
    ("sft/loss", "loss {:.3f}"),
    ("reward_model/loss", "loss {:.3f}"),
    ("dpo/loss", "loss {:.3f}"),
    ("reward_model/accuracy", "accuracy {:.3f}"),
    ("dpo/accuracy", "accuracy {:.3f}"),
    ("eval/perplexity", "held-out perplexity {:.3f}"),
    ("eval/accuracy", "held-out accuracy {:.3f}"),
    ("objective/score", "score {:.3f}"),
    ("objective/kl", "KL {:.2f}"),
    ("rollout/length_mean", "length {:.1f}"),
    ("throughput/tokens_per_s", "{:,.0f} tokens/s"),
)


def figures(metrics: Mapping[str, float]) -> str:
    """The figures that a person watches, as far as they were measured."""
    return "  ".join(text.format(metrics[name]) for name, text in _FIGURES if name in metrics)


def clock(seconds: float) -> str:
    """Whole seconds as m:ss or h:mm:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def time_left(durations: list[float], *, iterations_left: int) -> float:
    """Seconds to the end: the median of recent iterations, which one slow one does not move, for each."""
    return statistics.median(durations[-RECENT:]) * iterations_left


class Progress(Callback):
    """Iteration, phase, score, KL, length, tokens/s and time left.

    ``live=False``, or output that is no terminal, gives one line an iteration with the same figures.
    """

    def __init__(self, *, live: bool = True, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._use_bars = live and self._console.is_terminal
        self._durations: list[float] = []
        self._since = 0.0
        self._live: Live | None = None
        self._figures = Text()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._since = time.perf_counter()
        if self._use_bars:
            module = iterating(pl_module)
            self._bars = Bars(
                TextColumn("{task.description:<9}"),
                BarColumn(bar_width=32),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._whole = self._bars.add_task("iteration", total=module.total_iterations, note="")
            self._phase = self._bars.add_task("rollout", total=1, note="")
            self._live = Live(Group(self._bars, self._figures), console=self._console)
            self._live.start()
            module.progress = self.show_phase

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._live is not None:
            self._bars.update(self._whole, completed=trainer.current_epoch)

    def show_phase(self, phase: str, done: int, total: int) -> None:
        """Called by the module: ``done`` of ``total`` pieces of the phase rollout, score or update."""
        self._bars.update(self._phase, description=phase, completed=done, total=total)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        now = time.perf_counter()
        self._durations.append(now - self._since)
        self._since = now
        module, done = iterating(pl_module), trainer.current_epoch + 1
        left = time_left(self._durations, iterations_left=module.total_iterations - done)
        if self._live is not None:
            self._bars.update(self._whole, completed=done, note=f"{clock(left)} left")
            self._figures.plain = figures(module.metrics)
        else:
            count = f"iteration {done}/{module.total_iterations}"
            line = f"{count}  {figures(module.metrics)}  {clock(left)} left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._live is not None:
            self._bars.update(self._phase, visible=False)
        self._stop(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop(pl_module)

    def _stop(self, pl_module: LightningModule) -> None:
        if self._live is not None:
            self._live.stop()  # gives the cursor back
            self._live = None
            iterating(pl_module).progress = _silent


def _silent(phase: str, done: int, total: int) -> None:
    pass
