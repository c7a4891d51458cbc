"""A module of one weight that goes through the motions of PPO: real optimizer steps, made-up rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from rlhf_lightning.callbacks import build_callbacks
from rlhf_lightning.config.schema import Config
from rlhf_lightning.types import Prompts, Rollout

TEXTS = ("eat", "drink", "eat", "pay")


class Toy(LightningModule):
    """Two optimizer steps an iteration; ``scores[k]`` is the objective of iteration ``k``."""

    def __init__(self, config: Config, scores: list[float], seconds: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters(config.model_dump(mode="json"))
        self.weight = nn.Parameter(torch.zeros(3))
        self.config, self.scores, self.seconds = config, scores, seconds
        self.counters = {"iteration": 0, "optimizer_steps": 0, "responses": 0, "tokens": 0}
        self.metrics: dict[str, float] = {}
        self.responses = ("good", "bad", "fair", "poor")
        self.extra: dict[int, dict[str, float]] = {}
        self.fail: dict[int, BaseException] = {}
        self.raw_optimizer = False
        self.progress: Callable[[str, int, int], None] = lambda phase, done, total: None

    @property
    def total_iterations(self) -> int:
        return self.config.ppo.iterations

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        batch = Prompts(ids=((1,), (2,), (1,), (3,)), texts=TEXTS, rows=(0, 1, 2, 3))
        return DataLoader([batch], batch_size=None, collate_fn=lambda batch: batch)

    def transfer_batch_to_device(self, batch: Prompts, device: torch.device, dataloader_idx: int) -> Prompts:
        return batch  # Lightning would copy it field by field, which a frozen dataclass refuses

    def training_step(self, prompts: Prompts, batch_index: int) -> None:
        k = self.counters["iteration"]
        if k in self.fail:
            raise self.fail[k]
        optimizer = self.optimizers(use_pl_optimizer=not self.raw_optimizer)
        for step in range(2):
            optimizer.zero_grad()
            self.manual_backward(((self.weight - k - step) ** 2).sum())
            optimizer.step()
            self.progress("update", step + 1, 2)
        time.sleep(self.seconds)
        self.rollout = make_rollout(prompts.texts, self.responses)
        tokens = int(self.rollout.response_mask.sum())
        self.metrics = {
            "objective/score": self.scores[k],
            "objective/kl": 0.25 * k,
            "rollout/length_mean": tokens / 4,
            "rollout/tokens": float(tokens),
            **self.extra.get(k, {}),
        }
        self.counters["iteration"] += 1
        self.counters["optimizer_steps"] += 2
        self.counters["responses"] += 4
        self.counters["tokens"] += tokens

    def answer(self, prompts: Prompts) -> list[tuple[str, float]]:
        return [(f"{text} {float(self.weight[0]):.3f}", float(self.weight[0])) for text in prompts.texts]

    def save_adapters(self, folder: Path) -> None:
        (folder / f"after_{self.counters['iteration']}").write_text("adapter")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counters"] = dict(self.counters)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counters = dict(checkpoint["counters"])


def make_rollout(prompts: tuple[str, ...], responses: tuple[str, ...]) -> Rollout:
    """Four answers of 3, 1, 2 and 3 tokens; KL 0.5 a token; raw scores 1, 2, 3, 4, shaped ones half."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    zero = torch.zeros(4, 3)
    raw = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return Rollout(
        prompt_ids=torch.ones(4, 2, dtype=torch.long), prompt_mask=torch.ones(4, 2, dtype=torch.bool),
        response_ids=mask.long(), response_mask=mask, rows=torch.arange(4),
        ended=("length", "eos", "stop", "length"), prompts=prompts, responses=responses,
        scores=raw / 2, raw_scores=raw, parts={}, logprobs=zero, ref_logprobs=zero, entropy=zero, values=zero,
        kl=0.5 * mask, rewards=zero, advantages=zero, returns=zero,
    )  # fmt: skip


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """``make_config(3, every=2, samples=2, ...)``: a config of so many iterations of 4 answers."""

    def make(iterations: int, objective: str = "objective/score", **callbacks: Any) -> Config:
        return Config.model_validate(
            {
                "objective": objective,
                "reward": {"kind": "length", "target": 3},
                "ppo": {"iterations": iterations, "prompts_per_iteration": 4},
                "callbacks": {"progress": False, **callbacks},
            }
        )

    return make


@pytest.fixture
def make_toy() -> Callable[..., Toy]:
    return Toy


@pytest.fixture
def rollout() -> Rollout:
    return make_rollout(TEXTS, ("good", "bad", "fair", "poor"))


@pytest.fixture
def fit() -> Callable[..., Trainer]:
    """``fit(toy, run_dir, until=, resume_from=, callbacks=, loggers=)`` with a real Trainer."""

    def run(
        toy: Toy,
        run_dir: Path,
        *,
        until: int | None = None,
        resume_from: int = 0,
        callbacks: list[Callback] | None = None,
        loggers: list[Any] | None = None,
    ) -> Trainer:
        if callbacks is None:
            callbacks = build_callbacks(toy.config, run_dir, resume_from=resume_from)
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=until or toy.total_iterations, logger=loggers or [],
            callbacks=callbacks,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
            num_sanity_val_steps=0, inference_mode=False, default_root_dir=run_dir,
        )  # fmt: skip
        checkpoint = run_dir / "checkpoints" / "last.ckpt" if resume_from else None
        trainer.fit(toy, ckpt_path=checkpoint, weights_only=True)
        return trainer

    return run
