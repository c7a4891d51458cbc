"""One epoch, one batch, one iteration: through a real Trainer, over ranks, and after every kind of resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning.config.schema import DataConfig
from rlhf_lightning.data.datamodule import PromptDataModule
from rlhf_lightning.data.order import prompt_indices
from rlhf_lightning.errors import UserError
from rlhf_lightning.types import Prompts

COUNT, PER, SEED = 7, 4, 11


class Recorder(LightningModule):
    """Trains one number by hand, twice a batch as PPO would, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: dict[int, Prompts] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Prompts, batch_idx: int) -> None:
        assert batch_idx == 0 and self.current_epoch not in self.seen
        self.seen[self.current_epoch] = batch
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.weight**2)
            optimizer.step()


@pytest.fixture
def make(tmp_path: Path, word_tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(COUNT)))

    def maker(*, per: int = PER, samples: int = 1, seed: int = SEED, **settings: Any) -> PromptDataModule:
        config = DataConfig(path=str(path), **settings)
        return PromptDataModule(
            config, word_tokenizer, room=50, prompts_per_iteration=per, samples_per_prompt=samples, seed=seed
        )

    return maker


def trainer(folder: Path, epochs: int, *callbacks: Any, devices: int = 1, strategy: str = "auto") -> Trainer:
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def expected(iteration: int) -> list[str]:
    order = prompt_indices(COUNT, per_iteration=PER, iteration=iteration, seed=SEED, shuffle=True)
    return [f"w{i} w{i + 1}" for i in order]


def texts(recorder: Recorder) -> dict[int, list[str]]:
    return {epoch: list(batch.texts) for epoch, batch in recorder.seen.items()}


def test_by_hand(make) -> None:
    """3 prompts an iteration, 2 answers each, file order: iteration 1 takes prompts 3, 4, 5, each twice."""
    batch = make(per=3, samples=2, shuffle=False).dataset()[1]
    assert batch.ids == ((3, 4), (3, 4), (4, 5), (4, 5), (5, 6), (5, 6))
    assert batch.texts == ("w3 w4", "w3 w4", "w4 w5", "w4 w5", "w5 w6", "w5 w6")
    assert batch.rows == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_ranks_together_give_the_global_batch(make, world_size: int, samples: int) -> None:
    data = make(samples=samples)
    for iteration in range(4):
        whole = data.dataset()[iteration]
        parts = [data.dataset(rank=rank, world_size=world_size)[iteration] for rank in range(world_size)]
        for name in ("ids", "texts", "rows"):
            assert sum((getattr(part, name) for part in parts), ()) == getattr(whole, name)
        assert whole.rows == tuple(range(PER * samples))


def test_sizes_divide_or_both_numbers_are_named(make) -> None:
    with pytest.raises(UserError, match=r"ppo\.prompts_per_iteration=4 must be a multiple .* 3"):
        make().dataset(rank=0, world_size=3)


def test_the_trainer_gives_one_batch_an_epoch_in_the_counted_order(make, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer(tmp_path, 5).fit(recorder, datamodule=make())
    assert texts(recorder) == {k: expected(k) for k in range(5)}
    assert isinstance(recorder.seen[0], Prompts)


@pytest.mark.parametrize("when", ["train batch end", "train epoch end", "after fit"])
@pytest.mark.parametrize("done", [1, 3])
def test_68_a_resumed_run_continues_the_order(make, tmp_path: Path, when: str, done: int) -> None:
    """Save at one of three moments, resume to 5 iterations: the rest is that of the unbroken run."""
    path = tmp_path / "saved.ckpt"
    first = trainer(tmp_path, done) if when == "after fit" else trainer(tmp_path, done, Save(path, when))
    first.fit(Recorder(), datamodule=make())
    if when == "after fit":
        first.save_checkpoint(path)
    resumed = Recorder()
    trainer(tmp_path, 5).fit(resumed, datamodule=make(), ckpt_path=path, weights_only=True)
    assert texts(resumed) == {k: expected(k) for k in range(done, 5)}


class Save(ModelCheckpoint):
    """Saves every time at one moment of the loop, over the last one."""

    def __init__(self, path: Path, when: str) -> None:
        super().__init__(save_top_k=0)
        self.path, self.when = path, when

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self.when == "train batch end":
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self.when == "train epoch end":
            trainer.save_checkpoint(self.path)


def test_fetching_a_batch_draws_nothing_from_the_global_generator(make) -> None:
    loader = make().train_dataloader()
    before = torch.get_rng_state()
    assert len(list(loader)) == len(loader) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_faults_come_up_in_setup(make, tmp_path: Path) -> None:
    data = make(prompt_field="promt")
    with pytest.raises(UserError, match="did you mean 'prompt'"):
        data.setup("fit")


class RankRecorder(Recorder):
    """Leaves what each rank saw in a file: the ranks are processes of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        seen = {epoch: [batch.rows, batch.texts] for epoch, batch in self.seen.items()}
        (self.folder / f"rank{self.global_rank}.json").write_text(json.dumps(seen))


def test_two_ranks_of_a_real_trainer(make, tmp_path: Path) -> None:
    two = trainer(tmp_path, 2, devices=2, strategy="ddp_fork")
    two.fit(RankRecorder(tmp_path), datamodule=make(samples=2))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for k in range(2):
        (rows0, texts0), (rows1, texts1) = (rank[str(k)] for rank in ranks)
        assert (rows0, rows1) == ([0, 1, 2, 3], [4, 5, 6, 7])
        assert texts0 + texts1 == [text for text in expected(k) for _ in range(2)]
