"""Training on fixed examples: what SFT, reward models and DPO have in common."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlhf_lightning.config.algorithms import TrainingConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.roles import Role
from rlhf_lightning.randomness import counted_seed
from rlhf_lightning.stages.base import Stage

E = TypeVar("E")
Terms = dict[str, Tensor]  # name -> one detached value an item, (N,): items are pairs, or learned tokens


@dataclass
class SoFar:
    """What the optimizer steps of an iteration add up to until it ends."""

    done: int = 0
    total: float = 0.0  # losses
    found: dict[str, list[Tensor]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)


class Supervised(Stage, Generic[E]):
    """Adapters that learn from examples; ``training_step`` is one iteration of ``log_every`` optimizer steps.

    Every loss is a sum over the items of a micro-batch divided by the items of the whole optimizer step, so
    that micro-batching changes memory only. Held-out figures are measured with dropout off.

    Args:
        actor_critic: the roles on their backbone.
        config: the whole validated config.
        options: its section for this stage.
        steps: optimizer steps of the whole run.
        held_out: examples that are only measured on.
    """

    name: str
    """First part of the metrics' names, and the config section."""
    role: Role
    """Who learns."""
    rates: dict[str, str]
    """Parameter group -> the setting that holds its peak learning rate."""

    def __init__(
        self,
        actor_critic: ActorCritic,
        config: Config,
        options: TrainingConfig,
        *,
        steps: int,
        held_out: Sequence[E],
    ) -> None:
        super().__init__(actor_critic, config)
        self.options = options
        self.steps = steps
        self.held_out = held_out
        self._so_far: SoFar | None = None

    @property
    def total_iterations(self) -> int:
        return math.ceil(self.steps / self.options.log_every)

    # ---- what a stage adds ------------------------------------------------------------------------

    @abstractmethod
    def groups(self) -> dict[str, list[torch.nn.Parameter]]:
        """Trainable tensors by parameter group, in the names of ``rates``."""

    def peaks(self) -> dict[str, float]:
        """Peak learning rates by parameter group: one for all unless a stage has more."""
        return dict.fromkeys(self.rates, self.options.lr)

    @abstractmethod
    def items(self, batch: Sequence[E]) -> int:
        """What the loss of these examples is divided by."""

    @abstractmethod
    def size(self, example: E) -> int:
        """Tokens to compute for an example."""

    @abstractmethod
    def loss(self, batch: Sequence[E], denominator: int) -> tuple[Tensor, Terms]:
        """Summed loss over ``denominator``, and the figures of each item."""

    def figures(self, terms: Terms) -> dict[str, float]:
        """Figures of many items under their short names; their means unless a stage knows better."""
        return {name: float(values.mean()) for name, values in terms.items()}

    # ---- one iteration ----------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One AdamW, a parameter group for each learning rate."""
        groups = [{"params": tensors, "name": name} for name, tensors in self.groups().items()]
        return torch.optim.AdamW(groups, lr=0.0, weight_decay=self.options.weight_decay, fused=True)

    def training_step(self, steps: list[list[E]]) -> None:
        started = time.perf_counter()
        iteration = self.counters["iteration"]
        so_far = self._so_far = self._so_far or SoFar()
        self.actor_critic.train()
        for batch in steps[so_far.done :]:
            self.pause("update")
            so_far.total += self._step(batch, so_far)
            so_far.done += 1
            self.progress("update", so_far.done, len(steps))
        self.actor_critic.eval()
        self._so_far = None
        figures = self.figures({name: torch.cat(values) for name, values in so_far.found.items()})
        figures["loss"] = so_far.total / len(steps)
        self.metrics = {f"{self.name}/{key}": value for key, value in figures.items()}
        for name, norm in so_far.norms.items():
            self.metrics[f"{self.name}/{name}_grad_norm"] = norm / len(steps)
        for group in self.optimizer().param_groups:
            self.metrics[self.rates[group["name"]].replace(".", "/")] = group["lr"]
        self.metrics["time/update_s"] = time.perf_counter() - started
        self.counters["iteration"] += 1
        ends = self.counters["iteration"] >= self.total_iterations
        if self.held_out and (ends or (iteration + 1) % self.options.eval_every == 0):
            self.metrics |= {f"eval/{key}": value for key, value in self.measure(self.held_out).items()}
            self.metrics["time/eval_s"] = time.perf_counter() - started - self.metrics["time/update_s"]

    def _step(self, batch: list[E], so_far: SoFar) -> float:
        """One optimizer step; its loss. Figures of its items and gradient norms go to ``so_far``."""
        total, denominator = 0.0, self.items(batch)
        options, step = self.options, self.counters["optimizer_steps"]
        if self.config.model.lora.dropout:  # counted, so that a resumed run drops what the unbroken one did
            torch.manual_seed(counted_seed(self.config.seed, "dropout", step))
        for piece in self.micro_batches(batch):
            with self.actor_critic.roles.use(self.role):  # checkpointed layers run again in the backward
                loss, terms = self.loss(piece, denominator)
                self.manual_backward(loss)
            total += float(loss.detach())
            for name, values in terms.items():
                so_far.found.setdefault(name, []).append(values.cpu())
        self.set_rates(
            self.peaks(),
            step=step,
            total=self.steps,
            warmup=options.warmup,
            schedule=options.lr_schedule,
        )
        for name, norm in self.step(max_grad_norm=options.max_grad_norm, keys=self.rates).items():
            so_far.norms[name] = so_far.norms.get(name, 0.0) + norm
        self.counters["responses"] += len(batch)
        self.counters["tokens"] += sum(map(self.size, batch))
        return total

    def micro_batches(self, batch: Sequence[E]) -> Iterator[list[E]]:
        """Like lengths together; order and cut change no gradient."""
        ordered = sorted(batch, key=self.size)
        size = self.options.micro_batch_size
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]

    # ---- held-out rows ----------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, examples: Sequence[E]) -> tuple[float, Terms]:
        """The mean loss of these examples, and the figures of each item, sorted by the examples' length."""
        found: dict[str, list[Tensor]] = defaultdict(list)
        total, done, items = 0.0, 0, self.items(examples)
        for piece in self.micro_batches(examples):
            loss, terms = self.loss(piece, items)
            total += float(loss.detach())
            for name, values in terms.items():
                found[name].append(values.cpu())
            done += len(piece)
            self.progress("eval", done, len(examples))
        return total, {name: torch.cat(values) for name, values in found.items()}

    def measure(self, examples: Sequence[E]) -> dict[str, float]:
        """Figures of held-out examples under their short names."""
        loss, terms = self.look(examples)
        return {"loss": loss} | self.figures(terms)

    # ---- saving -----------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["so_far"] = vars(self._so_far) if self._so_far else None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        so_far = checkpoint.get("so_far")
        self._so_far = SoFar(**so_far) if so_far else None
        self.actor_critic.eval()
