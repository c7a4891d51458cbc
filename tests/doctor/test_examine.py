"""The doctor on sound set-ups: every check passes, nothing is left behind, and the reader is told."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from rlhf_lightning import doctor
from rlhf_lightning.doctor import PROOFS, examine, reward
from rlhf_lightning.doctor.exam import Exam
from rlhf_lightning.doctor.fingerprint import fingerprint

SETTINGS = {
    "llama, learned reward": {},
    "gpt2, shared critic, warm": {
        "family": "gpt2", "reward": "length", "model": {"critic": "shared"},
        "generation": {"temperature": 0.7},
        "ppo": {"whiten_advantages": False, "clip_value": None},
    },
    "llama nf4, checkpointing, critic first": {
        "model": {"quantization": "nf4", "gradient_checkpointing": True}, "reward": "combined",
        "ppo": {"critic_warmup": 2, "warmup": 5, "kl_target": 6.0, "target_kl": 1e-9},
    },
    "gpt2 nf4, SFT adapter, classifier": {
        "family": "gpt2", "reward": "classifier", "sft": True, "model": {"quantization": "nf4"},
        "ppo": {"kl_in": "loss", "entropy_coef": 0.01, "kl_estimator": "k3"},
    },
    "llama, RLOO": {
        "advantage": {"kind": "rloo"}, "ppo": {"prompts_per_iteration": 4, "samples_per_prompt": 2},
    },
    "gpt2, GRPO as GSPO, odd batches": {
        "family": "gpt2", "reward": "length", "advantage": {"kind": "grpo"}, "generation": {"batch_size": 3},
        "ppo": {"prompts_per_iteration": 4, "samples_per_prompt": 2, "ratio": "sequence",
                "loss_average": "response"},
    },
    "llama bfloat16": {"model": {"dtype": "bfloat16"}, "generation": {"max_new_tokens": 3}},
    "llama nf4, copied while it samples": {
        "reward": "length", "model": {"quantization": "nf4", "rollout_weights": "dequantized"},
    },
    "llama bfloat16, packed while it samples": {
        "reward": "length", "model": {"dtype": "bfloat16", "rollout_weights": "packed"},
        "generation": {"max_new_tokens": 3},
    },
    "llama by its own modules": {"reward": "length", "model": {"attention": "eager"}},
    "llama, one token, no value loss, odd batches": {
        "reward": "length", "generation": {"max_new_tokens": 1, "batch_size": 3},
        "ppo": {"vf_coef": 0.0, "micro_batch_size": 1},
    },
}  # fmt: skip


def run(parts) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=200)
    passed = examine(parts.module, parts.data, console)
    return passed, console.file.getvalue()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_sound_set_up_passes_every_check(make_parts, settings):
    passed, shown = run(make_parts(**settings))
    assert passed, shown
    assert f"{len(PROOFS)} of {len(PROOFS)} checks passed" in shown
    assert all(proof.name in shown and proof.meaning not in shown for proof in PROOFS)


def test_everything_is_put_back_to_the_last_bit(make_parts):
    parts = make_parts(ppo={"kl_target": 6.0, "normalize_scores": True})
    module = parts.module
    module.train()
    module.moments.update(torch.tensor([1.0, 2.0]))
    module.counters["responses"] = 5

    def state():
        return (
            fingerprint(dict(module.named_parameters()) | dict(module.named_buffers())),
            {name: p.requires_grad for name, p in module.named_parameters()},
            {name: part.training for name, part in module.named_modules()},
            dict(module.counters),
            dict(module.metrics),
            module.beta.state_dict(),
            str(module.moments.state_dict()),
            module.config,
            module.rollout,
            module.fabric,
            torch.get_rng_state().tolist(),
            [p.grad for p in module.parameters() if p.grad is not None],
            [name for name in vars(module.actor_critic) if name == "logits"],
        )

    before = state()
    run(parts)
    assert state() == before


def test_what_is_put_back_had_really_moved(make_parts):
    parts = make_parts()
    own = fingerprint(parts.module.state_dict())
    with Exam(parts.module, parts.data) as exam:
        assert exam.disturbed == 2 * 2 * 7  # roles, layers, linear layers
        inside = fingerprint(parts.module.state_dict())
        changed = {name for name in own if own[name] != inside[name]}
        assert changed == {name for name in own if ".lora_B." in name}
        with exam.at_start():
            assert fingerprint(parts.module.state_dict()) == own
        assert fingerprint(parts.module.state_dict()) == inside
    assert fingerprint(parts.module.state_dict()) == own


def test_an_error_while_preparing_leaves_the_start_too(make_parts, monkeypatch):
    parts = make_parts()
    own = fingerprint(parts.module.state_dict())
    monkeypatch.setattr(Exam, "sample", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(parts)
    assert fingerprint(parts.module.state_dict()) == own and parts.module.fabric is None


def test_a_failing_check_is_named_and_explained_and_the_others_go_on(make_parts, monkeypatch):
    monkeypatch.setattr(doctor, "PROOFS", reward.PROOFS)
    parts = make_parts(reward="length")
    parts.module.reward = lambda prompts, responses: {}["no such reward"]
    passed, shown = run(parts)
    failed = [proof for proof in reward.PROOFS if proof.meaning in " ".join(shown.split())]
    assert not passed and "KeyError: 'no such reward'" in shown
    assert [proof.run.__name__ for proof in failed] == ["one_finite_score_each", "order_does_not_matter"]
    assert "1 of 3 checks passed" in shown


def test_the_name_of_a_check_says_it_once():
    assert len({proof.name for proof in PROOFS}) == len(PROOFS)
    assert all(len(proof.name) <= 42 and proof.meaning.endswith(".") for proof in PROOFS)


def test_fingerprints_tell_a_changed_word_and_a_swap():
    x = torch.arange(37, dtype=torch.float32)
    changed, swapped = x.clone(), x.clone()
    changed[36] = 36.000004
    swapped[[2, 30]] = swapped[[30, 2]]
    tensors = {
        "x": x,
        "changed": changed,
        "swapped": swapped,
        "same": x.clone(),
        "bytes": x[:3].to(torch.uint8),
    }
    found = fingerprint(tensors | {"number": torch.tensor(1.5)})
    assert found["x"] == found["same"]
    assert len({found["x"], found["changed"], found["swapped"]}) == 3
    assert found["bytes"] == 3 + 0x020100  # its length, and one word with factor 1
