"""Before the first step the policy is what sampled, and what the KL is measured against."""

from __future__ import annotations

import torch

from rlhf_lightning.doctor.exam import Exam
from rlhf_lightning.doctor.proof import Finding, Proof
from rlhf_lightning.rollout.minibatches import micro_batches, slices, take


def ratio_is_one(exam: Exam) -> Finding:
    """The rollout's log-probabilities against the update's forward: in the same batches, and in its own."""
    rollout, model, size = exam.rollout, exam.model, exam.config.ppo.micro_batch_size
    exam.update_mode()
    same = [take(rollout, rows) for rows, _ in slices(rollout, size)]
    cut = list(micro_batches(rollout, torch.arange(len(rollout)), size))
    figures = []
    for batches in (same, cut):
        worst = 0.0
        for batch in batches:
            with model.roles.use("policy"):
                logprobs = model.policy(batch)[0].detach().cpu()
            ratio = (logprobs - batch.old_logprobs).exp()[batch.response_mask]
            worst = max(worst, float((ratio - 1).abs().max().nan_to_num(nan=float("inf"))))
        figures.append(worst)
    model.eval()
    with exam.undone():
        stats = exam.step(rollout, lr=0.0).stats.policy
    assert stats is not None
    clipped = float(stats.clip_fraction)
    passed = figures[0] <= exam.tolerance.same and figures[1] <= exam.tolerance.recut and clipped == 0
    tokens = int(rollout.response_mask.sum())
    return Finding(
        passed,
        f"max |ratio - 1| {figures[0]:.1e}, re-cut {figures[1]:.1e}, {tokens} tokens, {clipped:.0%} clipped",
    )


def kl_is_zero(exam: Exam) -> Finding:
    """log(pi / pi_ref) of every token of the undisturbed set-up."""
    with exam.at_start():
        rollout = exam.collect(exam.generation)
    log_ratio = (rollout.logprobs - rollout.ref_logprobs)[rollout.response_mask].abs()
    figure = float(log_ratio.max())
    source = "fresh adapter" if exam.config.model.adapter is None else "copy of model.adapter"
    return Finding(figure == 0.0, f"max |log(pi/ref)| {figure:.1e} over {len(log_ratio)} tokens, {source}")


def numbers_are_float32(exam: Exam) -> Finding:
    """Log-probabilities, entropies and values as they leave the model: a ratio needs more than bfloat16."""
    with torch.no_grad():
        logprobs, entropy = exam.model.policy(exam.made_up)
        assert entropy is not None
        found = {
            "log-probabilities": logprobs,
            "reference": exam.model.reference(exam.made_up),
            "entropies": entropy,
        }
        if exam.model.has_critic:
            found["values"] = exam.model.values(exam.made_up)
    coarse = [
        name for name, x in found.items() if x.dtype != torch.float32 or torch.equal(x, x.bfloat16().float())
    ]
    return Finding(
        not coarse,
        f"rounded: {', '.join(coarse)}"
        if coarse
        else f"{len(found)} of {len(found)} outputs use all of float32",
    )


PROOFS = (
    Proof(
        "ratio 1 before the first step",
        "The update sees another policy than the one that sampled, so the clip acts on noise. Usual causes: "
        "dropout that is on, position ids or temperature used in one pass only.",
        ratio_is_one,
    ),
    Proof(
        "KL 0 before the first step",
        "The policy does not start at its reference, so the KL penalty pulls towards another model. Usual "
        "causes: a reference with the wrong adapter, or an adapter that does not start at zero.",
        kl_is_zero,
    ),
    Proof(
        "scored in float32",
        "Log-probabilities or values were rounded to half precision, which moves every ratio by about a "
        "percent. Usual cause: log-softmax or a head in the model's own dtype.",
        numbers_are_float32,
    ),
)
