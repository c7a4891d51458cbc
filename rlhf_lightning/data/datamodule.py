"""Prompts for Lightning: one epoch is one iteration, and has exactly one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from rlhf_lightning.data.held_out import Part
from rlhf_lightning.data.order import prompt_indices
from rlhf_lightning.data.prompts import PromptSet, load_prompts
from rlhf_lightning.errors import UserError
from rlhf_lightning.types import Prompts

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig


class IterationSampler(Sampler[int]):
    """Yields one number an epoch: the epoch itself, as Lightning last told it.

    Lightning asks for the iterator before it says which epoch begins (``FitLoop.setup_data``), so the number
    is read only when the batch is.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield self.epoch

    def __len__(self) -> int:
        return 1


class IterationDataset(Dataset[Prompts]):
    """Item k is what one rank answers in iteration k.

    Prompt j of the iteration (j from 0, over all ranks) gives the responses ``j * samples_per_prompt`` and
    following, side by side, and a rank takes a contiguous slice: all answers to a prompt are sampled on one
    rank, and their row numbers do not depend on how many ranks there are.
    """

    def __init__(
        self,
        prompts: PromptSet,
        *,
        prompts_per_iteration: int,
        samples_per_prompt: int,
        seed: int,
        shuffle: bool,
        rank: int,
        world_size: int,
    ) -> None:
        if prompts_per_iteration % world_size:
            raise UserError(
                f"ppo.prompts_per_iteration={prompts_per_iteration} must be a multiple of the ranks, "
                f"of which there are {world_size}"
            )
        self.prompts = prompts
        self.prompts_per_iteration = prompts_per_iteration
        self.samples_per_prompt = samples_per_prompt
        self.seed = seed
        self.shuffle = shuffle
        share = prompts_per_iteration // world_size
        self.share = range(rank * share, (rank + 1) * share)

    def __getitem__(self, iteration: int) -> Prompts:
        indices = prompt_indices(
            len(self.prompts),
            per_iteration=self.prompts_per_iteration,
            iteration=iteration,
            seed=self.seed,
            shuffle=self.shuffle,
        )
        s = self.samples_per_prompt
        taken = [(indices[j], j * s + k) for j in self.share for k in range(s)]
        return Prompts(
            ids=tuple(tuple(self.prompts.ids[index]) for index, _ in taken),
            texts=tuple(self.prompts.texts[index] for index, _ in taken),
            rows=tuple(row for _, row in taken),
        )


class PromptDataModule(LightningDataModule):
    """Hands each rank its prompts of each iteration, as ``types.Prompts``.

    The order is counted, not carried: a run resumed at epoch k gets what the unbroken one got, with no state
    saved. Build the Trainer with ``use_distributed_sampler=False``: the slicing over ranks is done here.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        room: int,
        prompts_per_iteration: int,
        samples_per_prompt: int = 1,
        seed: int,
        part: Part = "all",
        share: float = 0.0,
    ) -> None:
        """
        Args:
            config: where prompts come from.
            tokenizer: of the policy.
            room: tokens that a prompt may take, see ``load_prompts``.
            prompts_per_iteration: over all ranks; a multiple of their number.
            samples_per_prompt: answers to each.
            seed: the run's.
            part, share: which side of the split into learning and measuring, see ``load_prompts``.
        """
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.room = room
        self.prompts_per_iteration = prompts_per_iteration
        self.samples_per_prompt = samples_per_prompt
        self.seed = seed
        self.part, self.share = part, share
        self._prompts: PromptSet | None = None

    @property
    def prompts(self) -> PromptSet:
        """All prompts, read once, on first use.

        Raises:
            UserError: see ``load_prompts``.
        """
        if self._prompts is None:
            self._prompts = load_prompts(
                self.config, self.tokenizer, room=self.room, part=self.part, share=self.share
            )
        return self._prompts

    @property
    def report(self) -> str:
        """One line for a person about what was read."""
        return self.prompts.report

    def dataset(self, *, rank: int = 0, world_size: int = 1) -> IterationDataset:
        """The iterations as one rank sees them; ``dataset()[0]`` is the first batch of a single process."""
        return IterationDataset(
            self.prompts,
            prompts_per_iteration=self.prompts_per_iteration,
            samples_per_prompt=self.samples_per_prompt,
            seed=self.seed,
            shuffle=self.config.shuffle,
            rank=rank,
            world_size=world_size,
        )

    def setup(self, stage: str) -> None:
        _ = self.prompts  # faults in the data come up before the first step

    def train_dataloader(self) -> DataLoader[Prompts]:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return DataLoader(
            self.dataset(rank=rank, world_size=world_size),
            batch_size=None,  # the item is the batch
            sampler=IterationSampler(),
            generator=torch.Generator(),  # else each epoch's iterator draws from the global generator
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # no tensors in it; and Lightning's own transfer refuses a frozen dataclass
