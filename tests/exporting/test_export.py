"""Exported folders load with Transformers or PEFT alone and say the same; nothing wrong leaves a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_lightning import export
from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.data.encoding import encode_judged
from rlhf_lightning.errors import UserError
from rlhf_lightning.exporting.merged import Sight, _compare
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import Part, reward_cast

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(model_folders, build, disturb, tmp_path):
    """``run(family, stage) -> folder`` of a finished run whose adapter really changes something."""

    def make(family: str = "llama", stage: str = "sft") -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        if stage == "reward":
            config = ModelConfig(path=str(model_folders[family]), quantization="none", dtype="float32")
            torch.manual_seed(2)
            roles = ActorCritic(load_backbone(config), config, cast=reward_cast(config), temperature=1.0)
            with torch.no_grad():
                roles.score_head.bias.fill_(0.75)
        else:
            roles = build(family)
        disturb(roles).save(folder / "adapters")
        settings = {
            "stage": {"name": stage},
            "model": {"path": str(model_folders[family]), "quantization": "none", "dtype": "float32"},
            "reward": {"kind": "length", "target": 3},
        }
        (folder / "config_resolved.yaml").write_text(yaml.safe_dump(settings))
        summary = {"status": "finished", "objective": "eval/nll", "last": {"sft/nll": 2.0, "eval/nll": 1.5}}
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


def greedy(model, tokenizer, text: str) -> str:
    ids = torch.tensor([tokenizer(text).input_ids])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    return tokenizer.decode(out[0, ids.shape[1] :])


def test_a_real_run_is_merged_and_loads_with_transformers_alone(tmp_path, capsys):
    small = ["ppo.iterations=1", "ppo.lr=0.01", "logger.wandb=null", "hydra.run.dir=run"]
    command = [sys.executable, str(ROOT / "train.py"), "debug=default", *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert export.main([str(tmp_path / "run"), "--merge", "--dtype", "float32"]) == 0
    folder = tmp_path / "run" / "merged"
    assert "greedy    4 of 4 texts of 24 tokens are the same" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_path("model")).chat_template
    base = AutoModelForCausalLM.from_pretrained(tiny_path("model"), dtype=torch.float32)
    prompt = "My review of the diner:"
    ids = torch.tensor([tokenizer(prompt).input_ids])
    with torch.no_grad():
        untuned = base(ids).logits
        tuned = PeftModel.from_pretrained(base, tmp_path / "run" / "adapters" / "policy")
        expected, found = tuned(ids).logits, merged(ids).logits
    assert (expected - untuned).abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert greedy(merged, tokenizer, prompt) == greedy(tuned, tokenizer, prompt)
    assert "objective/score" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "bfloat16"), ("llama", "float16"), ("gpt2", "float32")]
)
def test_merged_weights_have_the_dtype_and_the_base_keeps_its_config(
    run, model_folders, family, dtype, tmp_path
):
    folder = tmp_path / "out"
    assert export.main([str(run(family)), "--merge", "--dtype", dtype, "--to", str(folder)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {getattr(torch, dtype)}
    base = AutoModelForCausalLM.from_pretrained(model_folders[family])
    assert getattr(merged.config, "resid_pdrop", None) == getattr(base.config, "resid_pdrop", None)
    ends = {"llama": [0, 1], "gpt2": 0}[family]
    assert merged.generation_config.eos_token_id == ends
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))


def test_the_adapter_alone_is_peft_s_format_with_its_base(run, model_folders, tmp_path, capsys):
    source, folder = run(), tmp_path / "out"
    folder.mkdir()  # an empty one will do
    assert export.main([str(source), "--to", str(folder)]) == 0
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folders["llama"])
    ids = torch.tensor([[5, 9, 7]])
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
        before = base(ids).logits
        found = PeftModel.from_pretrained(base, folder)(ids).logits
        again = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
        expected = PeftModel.from_pretrained(again, source / "adapters" / "policy")(ids).logits
    assert torch.equal(found, expected) and not torch.equal(found, before)
    assert len(AutoTokenizer.from_pretrained(folder)) == 320
    card = (folder / "README.md").read_text()
    assert card.index("| eval/nll | 1.5 |") < card.index("| sft/nll | 2 |")
    assert f"exported  {folder}" in capsys.readouterr().out
    merged = tmp_path / "merged"  # and what was exported can be exported
    assert export.main([str(folder), "--merge", "--dtype", "float32", "--to", str(merged)]) == 0


def test_a_reward_model_becomes_a_sequence_classifier(run, build, tmp_path, capsys):
    folder = tmp_path / "out"
    source = run(stage="reward")
    assert export.main([str(source), "--merge", "--dtype", "float32", "--to", str(folder)]) == 0
    assert "constant  0.75 is to be added to the logit" in capsys.readouterr().out
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert classifier.config.score_bias == 0.75 and classifier.config.num_labels == 1
    roles = build(reward_path=str(source))
    for text in ("the soup was warm", "we"):
        ids = torch.tensor([encode_judged(tokenizer, text, " and fresh")])
        with torch.no_grad():
            logit = classifier(ids).logits[0, 0]
            torch.testing.assert_close(
                logit + 0.75, roles.score(ids, torch.ones_like(ids))[0], atol=1e-4, rtol=0
            )


def test_a_reward_adapter_keeps_its_head(run, build, tmp_path):
    folder = tmp_path / "out"
    assert export.main([str(run(stage="reward")), "--to", str(folder)]) == 0
    head = load_file(folder / "score_head.safetensors")
    assert head["bias"].item() == 0.75
    assert torch.equal(build(reward_path=str(folder)).score_head.weight, head["weight"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "RUN=nowhere: there is no such folder"),
        (["tiny"], "RUN=tiny is a whole model already"),
        (["RUN", "--dtype", "float32"], "--dtype float32 goes with --merge"),
        (["RUN", "--to", "RUN"], "is there already and not an empty folder"),
        (
            ["RUN/adapters/policy", "--model", "nowhere/at/all"],
            "--model nowhere/at/all: its tokenizer cannot be loaded",
        ),
        (["RUN", "--merge", "--to", "new", "--device", "abacus"], "--device abacus: there is no such device"),
        (["RUN", "--to", "RUN/summary.json/x"], "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_commands(run, tmp_path, monkeypatch, capsys, words, sentence):
    folder = run()
    monkeypatch.chdir(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*"))
    assert export.main([word.replace("RUN", str(folder)) for word in words]) == 1
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_a_merge_past_what_the_dtype_explains_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    """A weight changed between merging and writing: the folder read back is not what was merged."""
    from rlhf_lightning.exporting import merged

    def damaging(model, original):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)

    monkeypatch.setattr(merged, "_restore", damaging)
    assert export.main([str(run()), "--merge", "--to", str(tmp_path / "out")]) == 1
    assert "the merged model is not what base and adapter are together" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_a_dtype_explains_by_hand():
    """Logits of mean square 4 and one layer: bfloat16 explains 4 * 2^-7 * 2 = 0.0625."""
    before = Sight([torch.tensor([[2.0, -2.0]])], [])
    inside = Sight([torch.tensor([[2.0625, -2.0]])], [])
    line = _compare(before, inside, "bfloat16", 1)
    assert "largest logit difference 0.0625, mean 0.0312" in line and "explains a mean of 0.0625" in line
    for far in (torch.tensor([[2.25, -2.0]]), torch.tensor([[float("nan"), -2.0]])):
        with pytest.raises(UserError, match="is not what base and adapter are together"):
            _compare(before, Sight([far], []), "bfloat16", 1)


def test_help_and_faults_come_before_torch(tmp_path):
    code = (
        "import sys\nfrom rlhf_lightning import export, chat\n"
        "codes = [module.main(['nowhere']) for module in (export, chat)]\n"
        "print(codes, {'torch', 'transformers', 'peft'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.stdout == "[1, 1] set()\n"


def test_a_policy_is_named_in_the_cast_of_a_run(run):
    from rlhf_lightning.config.subject import find_subject
    from rlhf_lightning.loading import subject_cast

    folder = run()
    cast = subject_cast(find_subject(str(folder)), reference=True, reward="somewhere")
    policy = str(folder / "adapters" / "policy")
    assert cast == {
        "policy": Part("policy", policy, "RUN"),
        "reference": Part(None),
        "reward": Part("reward", "somewhere", "--reward"),
    }
