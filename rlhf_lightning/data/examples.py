"""Fixed examples for Lightning: one epoch is one iteration, and has one batch, of several optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from rlhf_lightning.config.algorithms import TrainingConfig
from rlhf_lightning.data.datamodule import IterationSampler
from rlhf_lightning.data.order import prompt_indices

E = TypeVar("E")


def total_steps(count: int, options: TrainingConfig) -> int:
    """Optimizer steps of a run over ``count`` examples."""
    whole = math.ceil(options.epochs * count / options.batch_size)
    return whole if options.max_steps is None else min(whole, options.max_steps)


class StepDataset(Dataset[list[list[E]]], Generic[E]):
    """Item k is the examples of iteration k, one list for each of its optimizer steps."""

    def __init__(self, examples: Sequence[E], options: TrainingConfig, *, seed: int, shuffle: bool) -> None:
        self.examples = examples
        self.options = options
        self.seed = seed
        self.shuffle = shuffle
        self.steps = total_steps(len(examples), options)

    @property
    def used(self) -> list[E]:
        """The examples that some step takes, each once, in the order of their first use."""
        return list(dict.fromkeys(one for step in range(self.steps) for one in self._step(step)))

    def __getitem__(self, iteration: int) -> list[list[E]]:
        first = iteration * self.options.log_every
        return [self._step(step) for step in range(first, min(first + self.options.log_every, self.steps))]

    def _step(self, step: int) -> list[E]:
        indices = prompt_indices(
            len(self.examples),
            per_iteration=self.options.batch_size,
            iteration=step,
            seed=self.seed,
            shuffle=self.shuffle,
        )
        return [self.examples[index] for index in indices]


class ExampleDataModule(LightningDataModule, Generic[E]):
    """Hands out the examples of each iteration; the order is counted: a resumed run needs no state."""

    def __init__(
        self,
        examples: Sequence[E],
        held_out: Sequence[E],
        options: TrainingConfig,
        *,
        seed: int,
        shuffle: bool,
        report: str,
    ) -> None:
        """
        Args:
            examples: to learn from.
            held_out: only measured on; may be empty.
            options: batch size, epochs and steps in an iteration.
            seed: the run's.
            shuffle: False takes them in file order.
            report: one line for a person about what was read.
        """
        super().__init__()
        self.held_out = held_out
        self.report = report
        self.dataset = StepDataset(examples, options, seed=seed, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[list[list[E]]]:
        return DataLoader(
            self.dataset,
            batch_size=None,  # the item is the batch
            sampler=IterationSampler(),
            generator=torch.Generator(),  # else each epoch's iterator draws from the global generator
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # no tensors in it
