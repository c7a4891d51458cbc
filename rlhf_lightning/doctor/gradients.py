"""Who learns, from what, and whether a rollout in between changes it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_lightning.doctor.exam import Exam, rows_of
from rlhf_lightning.doctor.proof import Finding, Proof
from rlhf_lightning.doctor.scoring import plain_logprobs
from rlhf_lightning.types import Generation, Rollout


def adapters_and_heads_learn(exam: Exam) -> Finding:
    """Gradients of one real optimizer step: all of the adapters and heads that train, and nothing else."""
    own, ppo = exam.own_names(), exam.config.ppo
    expected = {name for name in own if ppo.vf_coef > 0 or exam.own_role(name) == "policy"}
    with exam.undone():
        update = exam.step(exam.rollout, lr=0.0)
    reached = _reached(update.gradients)
    with exam.at_start():
        start = _reached(exam.step(exam.collect(exam.generation), lr=0.0).gradients)
    # At the very start B = 0 hides A from the gradient; B itself and the heads have to be reached.
    dead = {name for name in expected - start if ".lora_A." not in name and ".lora_embedding_A." not in name}
    faults = {
        "without a gradient": expected - reached,
        "without a gradient at the start": dead,
        "not theirs to learn": reached - own,
        "missing in the optimizer": own - update.optimized,
        "too much in the optimizer": update.optimized - own,
    }
    text = "; ".join(f"{len(names)} {what} ({min(names)})" for what, names in faults.items() if names)
    if not text:
        policy = sum(exam.own_role(name) == "policy" for name in own)
        text = f"{policy} policy"
        text += f" + {len(own) - policy} critic tensors" if exam.model.has_critic else " tensors, no critic,"
        text += " reached (fresh LoRA: A from the second step on)" if start < reached else ", all reached"
        text += "" if ppo.vf_coef > 0 or not exam.model.has_critic else ", critic left out by ppo.vf_coef=0"
    return Finding(bool(own) and not any(faults.values()), text)


def gradients_are_autograds(exam: Exam) -> Finding:
    """Gradients of the summed log-probabilities of two answers to one prompt, as an update takes them,
    against those that autograd finds through the model's own modules, one answer at a time.
    The figure is their distance as a share of the norm of all."""
    model, module = exam.model, exam.module
    pair, temperature = _twins(exam), exam.config.generation.temperature
    found = []
    exam.update_mode()
    for plain in (False, True):
        module.zero_grad(set_to_none=True)
        with model.roles.use("policy"):
            if plain:
                for row in (0, 1):
                    logprobs = plain_logprobs(exam, row, "policy", temperature=temperature, generation=pair)
                    logprobs.sum().backward()
            else:
                model.policy(pair)[0].sum().backward()
        found.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    module.zero_grad(set_to_none=True)
    model.eval()
    ours, theirs = found
    names, lost = ours.keys() & theirs.keys(), len(ours.keys() ^ theirs.keys())
    apart, whole = (
        sum(float(x.double().square().sum()) for x in tensors)
        for tensors in ([ours[n] - theirs[n] for n in names], [theirs[n] for n in names])
    )
    share = (apart / max(whole, 1e-60)) ** 0.5
    text = f"{len(names)} gradients of two answers, apart by {share:.1e} of their norm"
    passed = bool(names) and not lost and share <= exam.tolerance.gradient
    return Finding(passed, text + (f", {lost} on one side alone" if lost else ""))


def _twins(exam: Exam) -> Generation:
    """The longest answer, and the same with another first token: what they share is the prompt."""
    row = int(exam.generation.lengths.argmax())
    pair = rows_of(exam.generation, torch.tensor([row, row]))
    answers = pair.response_ids.clone()
    answers[1, 0] = (answers[1, 0] + 1) % len(exam.model.backbone.tokenizer)
    return replace(pair, response_ids=answers)


def losses_stay_apart(exam: Exam) -> Finding:
    """Advantages 0: the policy gets exactly nothing. Value loss 0: the critic gets exactly nothing.

    With ``model.critic=shared`` the trunk learns from both by design, and only the head is the critic's own.
    Where there is no critic, the first half is left.
    """
    rollout, shared = exam.rollout, exam.model.shared_critic
    flat = replace(rollout, advantages=torch.zeros_like(rollout.advantages))
    plain = {"entropy_coef": 0.0, "kl_in": "reward"}
    with exam.undone():
        values = _norms(exam, exam.step(flat, lr=0.0, vf_coef=1.0, **plain).gradients)
    with exam.undone():
        policy = _norms(exam, exam.step(rollout, lr=0.0, vf_coef=0.0, **plain).gradients)
    if not exam.model.has_critic:
        passed = values["policy"] == 0.0 < policy["policy"]
        return Finding(passed, f"advantages of 0 give the policy {values['policy']:.1e}; there is no critic")
    leaks = [policy["critic"]] if shared else [values["policy"], policy["critic"]]
    passed = not any(leaks) and values["critic"] > 0 and policy["policy"] > 0
    trunk = (
        "trunk shared by model.critic=shared"
        if shared
        else f"value loss on the policy {values['policy']:.1e}"
    )
    return Finding(
        passed, f"{trunk}, policy loss on the {'head' if shared else 'critic'} {policy['critic']:.1e}"
    )


def rollout_leaves_gradients(exam: Exam) -> Finding:
    """Gradients before the first rollout against gradients after several, and 4-bit layers that were packed.

    On a CPU with AVX512-BF16 bitsandbytes packs a 4-bit layer in eval mode; from then on it passes no
    gradient to its input and raises no error. Our own decoder never calls such a layer, but a row that it
    does not read still goes through the modules, so both are looked at. Where the device does not repeat a
    gradient exactly, that noise is allowed for.
    """
    before, repeated = exam.first_gradients
    exam.sample()
    exam.update_mode()
    after = exam.gradients(exam.made_up)
    exam.model.eval()
    noise, moved = _largest(before, repeated), _largest(before, after)
    lost = len(set(before) ^ set(after))
    layers = exam.four_bit()
    packed = sum(bool(getattr(layer.weight.quant_state, "packing_format_for_cpu", False)) for layer in layers)  # type: ignore[union-attr]
    passed = bool(before) and moved <= 4 * noise and not lost and not packed
    text = (
        "bit for bit equal"
        if moved == 0 and not lost
        else f"moved {moved:.1e} (device noise {noise:.1e}), {lost} lost"
    )
    return Finding(passed, f"{len(before)} gradients {text}; {packed} of {len(layers)} 4-bit layers packed")


def reference_stays(exam: Exam) -> Finding:
    """Reference log-probabilities before and after a hard step, to the last bit; the policy's must move."""
    with exam.undone(), torch.no_grad():
        before = _logprobs(exam)
        with torch.enable_grad():
            exam.step(exam.rollout, lr=1e-2)
        after = _logprobs(exam)
    mask = exam.rollout.response_mask
    policy, reference = ((one - two)[mask].abs() for one, two in zip(before, after, strict=True))
    passed = float(reference.max()) == 0.0 and float(policy.mean()) > 0.0
    return Finding(
        passed,
        f"reference moved {float(reference.max()):.1e}, policy {float(policy.mean()):.3f} nats a token",
    )


def _logprobs(exam: Exam) -> tuple[Tensor, Tensor]:
    rollout: Rollout = exam.collect(exam.generation)
    return rollout.logprobs, rollout.ref_logprobs


def _reached(gradients: dict[str, Tensor]) -> set[str]:
    return {name for name, gradient in gradients.items() if bool((gradient != 0).any())}


def _norms(exam: Exam, gradients: dict[str, Tensor]) -> dict[str, float]:
    found, own = {"policy": 0.0, "critic": 0.0}, exam.own_names()
    for name, gradient in gradients.items():
        if name in own:
            found[exam.own_role(name)] += float(gradient.float().abs().sum())
    return found


def _largest(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """Largest difference between gradients of the same name, as a share of the tensor's own norm."""
    shares = [
        float((one[name] - two[name]).norm() / one[name].norm().clamp(min=1e-30))
        for name in one.keys() & two.keys()
    ]
    return max(shares, default=0.0)


PROOFS = (
    Proof(
        "only adapters and heads learn, and all",
        "A tensor that should train gets no gradient, or one that should not gets some. Usual causes: an "
        "adapter loaded frozen, an optimizer built before the second adapter was active, gradient "
        "checkpointing cut off from its input.",
        adapters_and_heads_learn,
    ),
    Proof(
        "gradients are autograd's own",
        "The update takes another gradient than that of the log-probabilities it computes, so it climbs in "
        "the wrong direction although every figure looks right. Usual causes: a backward pass that does not "
        "belong to its forward, or a layer of the modules that cuts the gradient off.",
        gradients_are_autograds,
    ),
    Proof(
        "each loss reaches its own adapter only",
        "The value loss changes the policy or the policy loss the critic, so a large value error spoils the "
        "answers. Usual causes: the wrong role active in a forward, values not detached in the advantages.",
        losses_stay_apart,
    ),
    Proof(
        "gradients survive a rollout",
        "After sampling, the same loss gives other gradients: training looks alive and learns wrongly. "
        "Usual cause: 4-bit layers packed in eval mode (a CPU with AVX512-BF16), which then pass no "
        "gradient to their input; or weights that sampling left changed.",
        rollout_leaves_gradients,
    ),
    Proof(
        "the reference stands still",
        "The reference moved with a step, or the policy did not: the KL then measures nothing. Usual "
        "causes: a reference that shares the policy's adapter, or an optimizer without the policy's "
        "tensors.",
        reference_stays,
    ),
)
