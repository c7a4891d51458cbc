"""The reward: a LoRA adapter on the frozen language model and a linear score head, trained pairwise.

The score of an answer is ``weight . h + bias``, where ``h`` is the last hidden state, after the final norm,
at the last token of ``prompt + response`` with the end token appended.
"""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from scripts.tiny.language_model import right_padded

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT_RULE = "prompt + response as one string, end token appended; read at the end token, after the final norm"


class Scorer(nn.Module):
    """A language model under the adapter ``reward``, and the score head (float32)."""

    def __init__(self, model: PeftModel, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.head = nn.Linear(model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, texts: list[str]) -> Tensor:
        """The score of each whole text (prompt + response), (B,) float32."""
        rows = [[*ids, self.tokenizer.eos_token_id] for ids in self.tokenizer(texts)["input_ids"]]
        ids, mask = right_padded(rows, self.tokenizer.pad_token_id)
        trunk = self.model.get_base_model().model  # the Llama trunk, adapters in place; its output is normed
        hidden = trunk(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(rows)), mask.sum(dim=1) - 1]
        return self.head(last.float()).squeeze(-1)

    @torch.no_grad()
    def scores(self, texts: list[str], *, batch_size: int = 128) -> Tensor:
        """As ``forward``, in batches and without gradients."""
        return torch.cat([self(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)])

    def pair_accuracy(self, pairs: list[dict[str, str]]) -> float:
        """The share of pairs whose chosen answer scores higher."""
        chosen = self.scores([p["prompt"] + p["chosen"] for p in pairs])
        rejected = self.scores([p["prompt"] + p["rejected"] for p in pairs])
        return (chosen > rejected).float().mean().item()


def new_scorer(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> Scorer:
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    return Scorer(get_peft_model(model, config, adapter_name="reward"), tokenizer)


def load_scorer(model: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Scorer:
    """The stored reward on ``model``, quantised or not."""
    scorer = Scorer(PeftModel.from_pretrained(model, folder, adapter_name="reward"), tokenizer)
    scorer.head.load_state_dict(load_file(folder / "score_head.safetensors"))
    return scorer.eval()


def train_reward(
    scorer: Scorer,
    pairs: list[dict[str, str]],
    *,
    seed: int,
    epochs: int,
    batch_size: int = 32,
    lr: float = 2e-3,
    head_lr: float = 2e-2,
    decay: float = 0.01,
) -> None:
    """Bradley-Terry: minimise -log sigmoid(score(chosen) - score(rejected)) over the pairs."""
    torch.manual_seed(seed)
    rng = random.Random(f"{seed}/reward")
    adapter = [p for p in scorer.model.parameters() if p.requires_grad]
    groups = [{"params": adapter, "lr": lr}, {"params": list(scorer.head.parameters()), "lr": head_lr}]
    optimizer = torch.optim.AdamW(groups, weight_decay=decay, betas=(0.9, 0.98))
    total = epochs * (len(pairs) // batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1.0, (s + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * s / total))),
    )
    began, step = time.monotonic(), 0
    for epoch in range(epochs):
        order = rng.sample(range(len(pairs)), len(pairs))
        losses, right = [], 0
        for at in range(0, len(order) - batch_size + 1, batch_size):
            batch = [pairs[i] for i in order[at : at + batch_size]]
            texts = [p["prompt"] + p["chosen"] for p in batch] + [p["prompt"] + p["rejected"] for p in batch]
            chosen, rejected = scorer(texts).chunk(2)
            loss = -nn.functional.logsigmoid(chosen - rejected).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            losses.append(loss.item())
            right += int((chosen > rejected).sum())
        mean, share, took = (
            sum(losses) / len(losses),
            right / (batch_size * len(losses)),
            time.monotonic() - began,
        )
        print(f"  epoch {epoch}: loss {mean:.3f}, accuracy {share:.3f}, {took:.0f} s", flush=True)


def centre_on(scorer: Scorer, pairs: list[dict[str, str]]) -> None:
    """Move the bias so that the chosen answers of ``pairs`` score 0 on average."""
    with torch.no_grad():
        scorer.head.bias -= scorer.scores([p["prompt"] + p["chosen"] for p in pairs]).mean()


def save_scorer(scorer: Scorer, folder: Path, facts: dict[str, float | str]) -> None:
    """PEFT's own format, the head beside it, and what is known about it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = scorer.model.peft_config["reward"]
    config.base_model_name_or_path = "../model"  # a path of the building machine would mean nothing elsewhere
    nested = folder / "reward"  # PEFT puts an adapter that is not called "default" in a folder of its name
    scorer.model.save_pretrained(folder, save_embedding_layers=False)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (nested / name).replace(folder / name)
    for left in list(nested.iterdir()):
        left.unlink()
    nested.rmdir()
    (folder / "README.md").unlink(missing_ok=True)
    save_file(
        {"weight": scorer.head.weight.detach().clone(), "bias": scorer.head.bias.detach().clone()},
        folder / "score_head.safetensors",
    )
    (folder / "reward.json").write_text(json.dumps(facts, indent=2) + "\n")
