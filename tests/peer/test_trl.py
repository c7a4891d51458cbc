"""The losses and group advantages against TRL: its trainers compute, ours gets the same tensors.

Nothing of TRL is replaced. A trainer is built whole on a small real model, a batch goes through its collator
and its own loss method, and what enters our function is what entered that formula: the log-probabilities,
scores or rewards of the same models on the same batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_lightning.advantages import grpo, rloo
from rlhf_lightning.functional import bradley_terry_loss, dpo_loss, token_logprobs

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
trl = pytest.importorskip("trl", reason="make test-peer installs it")
datasets = pytest.importorskip("datasets")

PAIRS = [
    {"prompt": "the soup", "chosen": " was warm and the bread was fresh", "rejected": " was cold"},
    {"prompt": "we", "chosen": " would come back", "rejected": " had nothing on the menu worth the price"},
    {"prompt": "a slow waiter", "chosen": " brought noodles", "rejected": " brought a cold plate of rice"},
]


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-6, in the wider of the two types."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=1e-6)


def common(folder: Path, **options: Any) -> dict[str, Any]:
    quiet = {"report_to": [], "use_cpu": True, "bf16": False, "fp16": False, "gradient_checkpointing": False}
    return {"output_dir": str(folder), "per_device_train_batch_size": len(PAIRS)} | quiet | options


def shaken(model: torch.nn.Module, *, seed: int) -> torch.nn.Module:
    """Weights moved far enough that log-ratios are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.05)
    return model


@pytest.fixture(scope="module")
def folder(model_folders: dict[str, Path]) -> Path:
    return model_folders["llama"]


class PreferenceCase(SimpleNamespace):
    """What TRL's DPO trainer makes of one batch, and the log-probabilities it made it from."""

    def trl_loss(self, kind: str, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
        self.trainer.loss_types, self.trainer.beta = [kind], beta
        self.trainer.label_smoothing = label_smoothing
        return self.trainer.compute_loss(self.trainer.model, dict(self.batch))

    def logprobs(self, model: torch.nn.Module) -> Tensor:
        """log pi of every token of the answers, (2 B, T - 1), 0 elsewhere, by the path TRL takes."""
        labels = self.batch["input_ids"].masked_fill(self.batch["completion_mask"] == 0, -100)
        inputs = {name: self.batch[name] for name in ("input_ids", "attention_mask")}
        return model(**inputs, labels=labels, fused_lm_head=True).log_probs

    def ours(self, *, per_token: bool = False, **options: Any) -> Tensor:
        count = self.batch["completion_mask"].sum(dim=1) if per_token else 1
        policy = self.logprobs(self.trainer.model).sum(dim=1) / count
        with torch.no_grad():
            reference = self.logprobs(self.trainer.ref_model).sum(dim=1) / count
        (a, b), (c, d) = policy.chunk(2), reference.chunk(2)
        return dpo_loss(a, b, ref_chosen=c, ref_rejected=d, **options)[0]


@pytest.fixture(scope="module")
def preference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], PreferenceCase]:
    """The case of the first ``n`` pairs; float64 models, the policy not its reference."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def load() -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(folder).double().eval()

    trainer = trl.DPOTrainer(
        model=shaken(load(), seed=1),
        ref_model=load(),
        args=trl.DPOConfig(**common(tmp_path_factory.mktemp("dpo"))),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=tokenizer,
    )
    trainer.model.eval()

    def case(n: int) -> PreferenceCase:
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(n)])
        return PreferenceCase(trainer=trainer, batch=batch)

    return case


class TestPreferenceLosses:
    def test_the_log_probabilities_themselves(self, preference: Callable[[int], PreferenceCase]) -> None:
        case = preference(3)
        ids, mask = case.batch["input_ids"], case.batch["completion_mask"][:, 1:].bool()
        with torch.no_grad():
            inputs = {"input_ids": ids, "attention_mask": case.batch["attention_mask"]}
            logits = case.trainer.model(**inputs).logits
            theirs = case.logprobs(case.trainer.model)
        ours = token_logprobs(logits[:, :-1], ids[:, 1:])
        assert_equal(ours[mask], theirs[mask])

    @pytest.mark.parametrize("beta", [0.05, 0.7])
    def test_dpo(self, preference: Callable[[int], PreferenceCase], beta: float) -> None:
        case = preference(3)
        ours, theirs = case.ours(beta=beta), case.trl_loss("sigmoid", beta=beta)
        assert abs(theirs.item() - 0.6931472) > 1e-3  # the policy is not its reference
        assert_equal(ours, theirs)

    def test_dpo_gradients(self, preference: Callable[[int], PreferenceCase]) -> None:
        case = preference(3)
        weights = list(case.trainer.model.parameters())
        theirs = torch.autograd.grad(case.trl_loss("sigmoid", beta=0.7), weights)
        ours = torch.autograd.grad(case.ours(beta=0.7), weights)
        assert max(g.abs().max() for g in theirs) > 1e-2
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)

    def test_dpo_with_label_smoothing(self, preference: Callable[[int], PreferenceCase]) -> None:
        """TRL's ``sigmoid`` takes no label smoothing any more. Its ``aot`` does, and sorts log-ratios over
        the batch first, which changes nothing where the batch is one pair: there it is the smoothed DPO loss.
        """
        case = preference(1)
        ours, theirs = (
            case.ours(beta=0.7, label_smoothing=0.2),
            case.trl_loss("aot", beta=0.7, label_smoothing=0.2),
        )
        assert_equal(ours, theirs)
        assert abs(ours.item() - case.ours(beta=0.7).item()) > 1e-3

    def test_the_robust_form_is_two_smoothed_ones_apart(
        self, preference: Callable[[int], PreferenceCase]
    ) -> None:
        """(1-s) l(h) - s l(-h) = 2 (1-s) l(h) - [(1-s) l(h) + s l(-h)], over 1 - 2s, on a batch of three."""
        case, s = preference(3), 0.2
        mixed = 2 * (1 - s) * case.ours(beta=0.7) - case.ours(beta=0.7, label_smoothing=s)
        theirs = case.trl_loss("robust", beta=0.7, label_smoothing=s)
        assert_equal(mixed / (1 - 2 * s), theirs)

    @pytest.mark.parametrize("beta", [0.1, 0.7])
    def test_ipo(self, preference: Callable[[int], PreferenceCase], beta: float) -> None:
        """TRL averages the log-ratio over an answer's tokens, equation 17 of the paper sums it."""
        case = preference(3)
        theirs = case.trl_loss("ipo", beta=beta)
        ours = case.ours(beta=beta, kind="ipo", per_token=True)
        assert_equal(ours, theirs)
        assert abs(case.ours(beta=beta, kind="ipo").item() - theirs.item()) > 1e-2


@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry(folder: Path, tmp_path: Path, with_margin: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=1).double()
    rows = [pair | ({"margin": 0.3 * i} if with_margin else {}) for i, pair in enumerate(PAIRS)]
    trainer = trl.RewardTrainer(
        model=shaken(model, seed=2),
        args=trl.RewardConfig(**common(tmp_path)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(PAIRS))])
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    margin = batch.pop("margin", None)
    assert (margin is not None) == with_margin
    chosen, rejected = trainer.model(**batch).logits.squeeze(-1).chunk(2)
    ours, _ = bradley_terry_loss(chosen, rejected, margin=None if margin is None else margin.double())
    assert_equal(ours, theirs)


REWARDS = [0.3, -1.25, 2.0, 0.7, 0.1, 0.1, -0.4, 0.9]
"""Two groups of four."""


def advantages(kind: str, folder: Path, tmp_path: Path, **options: Any) -> Tensor:
    """What a TRL trainer samples, scores by ``REWARDS`` and turns into advantages, (8,)."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        return REWARDS[: len(completions)]

    config, trainer_class = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    }[kind]
    settings = {"num_generations": 4, "max_completion_length": 3, "beta": 0.0} | options
    trainer = trainer_class(
        model=LlamaForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=config(**common(tmp_path, per_device_train_batch_size=8, **settings)),
        train_dataset=datasets.Dataset.from_list([{"prompt": "the soup"}, {"prompt": "we"}]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )
    rows = [{"prompt": prompt} for prompt in ("the soup", "we") for _ in range(4)]
    return trainer._generate_and_score_completions(rows)["advantages"]


class TestGroupAdvantages:
    def test_rloo(self, folder: Path, tmp_path: Path) -> None:
        theirs = advantages("rloo", folder, tmp_path, normalize_advantages=False)
        assert_equal(rloo(torch.tensor(REWARDS), group_size=4), theirs)

    def test_grpo_without_the_deviation(self, folder: Path, tmp_path: Path) -> None:
        theirs = advantages("grpo", folder, tmp_path, scale_rewards="none")
        assert_equal(grpo(torch.tensor(REWARDS), group_size=4, scale=False), theirs)

    def test_grpo(self, folder: Path, tmp_path: Path) -> None:
        theirs = advantages("grpo", folder, tmp_path, scale_rewards="group")
        assert_equal(grpo(torch.tensor(REWARDS), group_size=4), theirs)
