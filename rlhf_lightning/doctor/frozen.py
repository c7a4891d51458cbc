"""What may never change, and what may never be random."""

from __future__ import annotations

import torch
from torch import nn

from rlhf_lightning.doctor.exam import Exam
from rlhf_lightning.doctor.fingerprint import fingerprint
from rlhf_lightning.doctor.proof import Finding, Proof


def frozen_bytes_unchanged(exam: Exam) -> Finding:
    """Fingerprints of every frozen tensor from before the first forward against those after a hard step."""
    with exam.undone():
        exam.step(exam.rollout, lr=1e-2)
        now = fingerprint(exam.unchanging())
    changed = sorted(
        name for name in exam.frozen.keys() | now.keys() if exam.frozen.get(name) != now.get(name)
    )
    size = sum(t.numel() * t.element_size() for t in exam.unchanging().values()) / 2**20
    text = f", {len(changed)} changed, first {changed[0]}" if changed else ", none changed"
    return Finding(not changed and bool(now), f"{len(now)} tensors, {size:,.1f} MiB{text}")


def dropouts_are_off(exam: Exam) -> Finding:
    """Every dropout module and attention rate is 0, and two passes in train mode agree to the last bit."""
    found = []
    for name, module in exam.module.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            found.append(f"{name} {module.p:g}")
        rate = getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            found.append(f"{name}.attention_dropout {rate:g}")
    exam.model.train()
    with torch.no_grad():
        one, two = (torch.cat(_outputs(exam), 1) for _ in range(2))
    exam.model.eval()
    moved = float((one - two).abs().max())
    text = f"{len(found)} above 0" + (f" (first {found[0]})" if found else "")
    return Finding(not found and moved == 0.0, f"{text}; two passes in train mode differ by {moved:.1e}")


def _outputs(exam: Exam) -> list[torch.Tensor]:
    logprobs = exam.model.policy(exam.made_up)[0]
    return [logprobs, exam.model.values(exam.made_up)] if exam.model.has_critic else [logprobs]


PROOFS = (
    Proof(
        "the frozen weights keep their bytes",
        "A step changed weights that all roles share, so reference and reward moved too. Usual causes: a "
        "base layer that requires grad and sits in the optimizer, or an adapter merged into its base.",
        frozen_bytes_unchanged,
    ),
    Proof(
        "all dropouts are 0",
        "Two passes over the same tokens disagree, so the ratio is not 1 before a step. Usual causes: a "
        "rate in the adapter's own config (lora_dropout), or in a model type whose rate has another name.",
        dropouts_are_off,
    ),
)
