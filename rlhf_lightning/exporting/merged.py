"""The adapter merged into its base in 16 or 32 bits, read back with Transformers alone and compared.

Never merged into 4-bit weights: rounded to nf4 again, most of what was learned would be gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.config.subject import Subject
from rlhf_lightning.data.encoding import encode_judged
from rlhf_lightning.errors import UserError
from rlhf_lightning.exporting.adapter import base_of, load_tokenizer, trained_on
from rlhf_lightning.exporting.card import card
from rlhf_lightning.exporting.prompts import prompts_of
from rlhf_lightning.loading import load_roles
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import DTYPES

NEW_TOKENS = 24
SLACK = 4.0
"""How far past the rounding of independent errors a difference may go."""

_POLICY = """
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
"""
_REWARD = """
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER, dtype="auto")
# end every text with tokenizer.eos_token, then: score = logits[:, 0] + model.config.score_bias
"""


@dataclass(frozen=True)
class Sight:
    """What a model makes of the prompts: logits (positions, V) or scores (1, 1) of each, greedy texts."""

    outputs: list[Tensor]
    texts: list[str]


def write(
    subject: Subject, folder: Path, *, dtype: str, device: torch.device, tell: Callable[[str], None]
) -> list[str]:
    """Merge into ``folder`` and prove it.

    Args:
        dtype: of the merged weights: bfloat16, float16 or float32.
        tell: called with each step, before it.

    Returns:
        Lines that tell what was measured.

    Raises:
        UserError: something does not fit, or the merged model is not what base and adapter are together.
    """
    original = _plain_config(subject)
    plain = subject.model.model_copy(
        update={"quantization": "none", "dtype": dtype, "gradient_checkpointing": False}
    )
    tell(f"loading {base_of(subject)} in {dtype}")
    roles = load_roles(_with(subject, plain), device=device)
    tokenizer = roles.backbone.tokenizer
    prompts = [ids[-roles.backbone.context_length // 2 :] for ids in _encoded(subject, tokenizer)]
    layers = len(
        {name.partition(".lora_A.")[0] for name, _ in roles.named_parameters() if ".lora_A." in name}
    )
    before = _judged(roles, prompts) if subject.judges else _spoken(roles, prompts)
    bias = float(roles.score_head.bias.detach()) if roles.score_head is not None else None
    tell(f"merging {layers} layers")
    merged = _merge(roles, "reward" if subject.judges else "policy")
    _restore(merged, original)
    ends, pad = sorted(roles.backbone.end_ids), roles.backbone.pad_id
    if subject.judges:
        merged = _classifier(merged, roles, dtype=DTYPES[dtype])
    elif merged.generation_config is not None:
        merged.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
        merged.generation_config.pad_token_id = pad
    gigabytes = sum(p.numel() * p.element_size() for p in merged.parameters()) / 1e9
    tell(f"writing {gigabytes:.2f} GB")
    merged.save_pretrained(folder)
    load_tokenizer(subject).save_pretrained(folder)
    del merged, roles
    tell("reading it back with Transformers alone")
    after = _read_back(folder, prompts, device, judges=subject.judges, bias=bias or 0.0)
    report = [_compare(before, after, dtype, layers)]
    if subject.judges:
        report.append(f"constant  {bias:.6g} is to be added to the logit: score_bias in config.json")
    else:
        same = sum(a == b for a, b in zip(before.texts, after.texts, strict=True))
        report.append(f"greedy    {same} of {len(prompts)} texts of {NEW_TOKENS} tokens are the same")
    how = _REWARD if subject.judges else _POLICY
    notes = [trained_on(subject), f"Merged in {dtype}; {report[0].partition('  ')[2].strip()}."]
    text = card(subject, base=base_of(subject), library="transformers", how=how, notes=notes)
    (folder / "README.md").write_text(text, "utf-8")
    return report


def _with(subject: Subject, model: ModelConfig) -> Subject:
    return replace(subject, model=model)


def _plain_config(subject: Subject) -> Any:
    """The base's own config.

    Raises:
        UserError: its weights are stored quantised.
    """
    model = subject.model
    try:
        config = AutoConfig.from_pretrained(
            base_of(subject), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--model {model.path}: no model can be loaded there; say with --model where the base lies"
        ) from error
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"--model {model.path} is stored quantised, and merging into that would lose what was learned: "
            "give --model with the plain weights"
        )
    return config


def _encoded(subject: Subject, tokenizer: Any) -> list[list[int]]:
    texts = prompts_of(subject)
    if subject.judges:
        return [encode_judged(tokenizer, text, "") for text in texts]
    return [tokenizer(text).input_ids or [0] for text in texts]


def _merge(roles: ActorCritic, adapter: str) -> PreTrainedModel:
    try:
        with roles.roles.use("reward" if adapter == "reward" else "policy"):
            return roles.model.merge_and_unload(safe_merge=True, adapter_names=[adapter])  # type: ignore[operator]
    except ValueError as error:
        raise UserError(f"RUN cannot be merged: {error}") from error


def _restore(model: PreTrainedModel, original: Any) -> None:
    """Loading switched every dropout off in the config; what is written has the base's own."""
    for name, value in vars(original).items():
        if "drop" in name or "jitter" in name:
            setattr(model.config, name, value)


def _classifier(merged: PreTrainedModel, roles: ActorCritic, *, dtype: torch.dtype) -> PreTrainedModel:
    """Trunk and score head as a sequence classifier with one logit; its config keeps the head's constant."""
    head = roles.score_head
    assert head is not None
    config = merged.config
    config.num_labels, config.score_bias = 1, float(head.bias.detach())
    config.pad_token_id = _free_pad(roles)
    try:
        model = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise UserError(
            f"RUN cannot be merged: Transformers has no sequence classifier of {config.model_type}; "
            "export it without --merge"
        ) from error
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.bias is not None:
        raise UserError(
            f"RUN cannot be merged: the sequence classifier of {config.model_type} has another head than one "
            "linear layer; export it without --merge"
        )
    model = model.to(merged.device, dtype)
    model.base_model.load_state_dict(merged.base_model.state_dict())
    with torch.no_grad():
        model.score.weight.copy_(head.weight)
    return model.eval()


def _free_pad(roles: ActorCritic) -> int | None:
    """A token for padding that ends no text: classifiers read at the last other token. None: no such."""
    pad = roles.backbone.pad_id
    return None if pad in roles.backbone.end_ids else pad


@torch.no_grad()
def _spoken(roles: ActorCritic, prompts: list[list[int]]) -> Sight:
    with roles.roles.use("policy"):
        return _sight(roles.backbone.model, prompts, roles.backbone.tokenizer)


@torch.no_grad()
def _judged(roles: ActorCritic, prompts: list[list[int]]) -> Sight:
    ids = [torch.tensor([row]) for row in prompts]
    return Sight([roles.score(row, torch.ones_like(row)).cpu().reshape(1, 1) for row in ids], [])


@torch.no_grad()
def _read_back(
    folder: Path, prompts: list[list[int]], device: torch.device, *, judges: bool, bias: float
) -> Sight:
    from transformers import AutoTokenizer

    kind = AutoModelForSequenceClassification if judges else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype="auto", device_map={"": device}).eval()
    if judges:
        ids = [torch.tensor([row], device=device) for row in prompts]
        return Sight([model(input_ids=row).logits.float().cpu() + bias for row in ids], [])
    return _sight(model, prompts, AutoTokenizer.from_pretrained(folder))


def _sight(model: Any, prompts: list[list[int]], tokenizer: Any) -> Sight:
    outputs, texts = [], []
    for row in prompts:
        ids = torch.tensor([row], device=model.device)
        outputs.append(model(input_ids=ids).logits[0].float().cpu())
        # Only the length and greed are ours: the rest is what a user of the exported folder gets.
        answer = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts.append(tokenizer.decode(answer[0, len(row) :]))
    return Sight(outputs, texts)


def _compare(before: Sight, after: Sight, dtype: str, layers: int) -> str:
    """One line with the differences.

    Every merged weight is rounded to the dtype, and so is every product before and after: independent
    relative errors of about eps a layer, which add up like the root of their number.

    Raises:
        UserError: the mean difference is larger than that explains.
    """
    pairs = list(zip(before.outputs, after.outputs, strict=True))
    gaps = torch.cat([(a - b).abs().flatten() for a, b in pairs])
    scale = torch.cat([a.flatten() for a, _ in pairs]).square().mean().sqrt()
    allowed = SLACK * torch.finfo(DTYPES[dtype]).eps * layers**0.5 * float(scale)
    what = "score" if before.outputs[0].numel() == 1 else "logit"
    figures = f"largest {what} difference {gaps.max():.3g}, mean {gaps.mean():.3g}"
    if not gaps.mean() <= allowed:  # NaN too
        raise UserError(
            f"the merged model is not what base and adapter are together: {figures}, and {dtype} explains a "
            f"mean of {allowed:.3g}; nothing was written"
        )
    return f"compared  {figures} ({dtype} explains a mean of {allowed:.3g})"
