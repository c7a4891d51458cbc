"""The identity of a backbone beside a saved adapter: however it is loaded the same, for others another."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.identity import FILE, identify


@pytest.fixture
def saved(build, disturb, tmp_path) -> Path:
    folder = tmp_path / "adapters"
    disturb(build()).save(folder)
    return folder


@pytest.fixture
def other(model_folders, tmp_path):
    """``other(change) -> folder`` of the same architecture, after ``change(model, tokenizer)``."""

    def make(change) -> str:
        folder = tmp_path / "other"
        model = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
        tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
        with torch.no_grad():
            change(model, tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def test_every_way_to_load_a_model_gives_one_identity(model_folders):
    path = str(model_folders["llama"])
    ways = [("none", "float32"), ("none", "bfloat16"), ("nf4", "bfloat16"), ("nf4", "float32")]
    seen = {identify(load_backbone(ModelConfig(path=path, quantization=q, dtype=d)), "here") for q, d in ways}
    assert len(seen) == 1
    half = identify(load_backbone(ModelConfig(path=path, quantization="none", dtype="float16")), "here")
    assert half.embedding is None  # rounded twice
    assert half.vocabulary == seen.pop().vocabulary


def test_it_lies_beside_each_saved_adapter_and_lets_a_moved_model_through(
    build, saved, model_folders, tmp_path
):
    stored = json.loads((saved / "policy" / FILE).read_text())
    assert stored["path"] == str(model_folders["llama"])
    assert (saved / "critic" / FILE).is_file()
    moved = shutil.copytree(model_folders["llama"], tmp_path / "moved")
    build(adapter=str(saved / "policy"), path=str(moved))


def test_the_base_of_a_copied_adapter_is_this_model(build, saved, model_folders, tmp_path):
    config = saved / "policy" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "elsewhere"}))
    build(adapter=str(saved / "policy")).save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "policy" / "adapter_config.json").read_text())
    assert again["base_model_name_or_path"] == str(model_folders["llama"])


def test_another_embedding_is_another_model(build, saved, other, model_folders):
    path = other(lambda model, tokenizer: model.get_input_embeddings().weight[-1].add_(1))
    with pytest.raises(UserError) as caught:
        build(adapter=str(saved / "policy"), path=path)
    assert str(caught.value) == (
        f"model.adapter={saved / 'policy'} was trained on another model: on {model_folders['llama']}, not on "
        f"model.path={path} (their embeddings differ)"
    )
    (saved / "policy" / FILE).unlink()  # an adapter from elsewhere says nothing
    build(adapter=str(saved / "policy"), path=path)


def test_another_shape_is_told_before_the_tensors_are_tried(build, saved):
    with pytest.raises(UserError, match=r"was made for another model: .* model_type=llama.*model_type=gpt2"):
        build("gpt2", adapter=str(saved / "policy"))
    config = saved / "policy" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "moved/away"}))
    with pytest.raises(UserError, match=r"was trained on another model: .*\(their architectures differ\)"):
        build("gpt2", adapter=str(saved / "policy"))


def test_another_vocabulary_is_refused(build, saved, other):
    path = other(lambda model, tokenizer: _respell(tokenizer))
    with pytest.raises(UserError, match=r"was trained with another tokenizer: that of .*, whose vocabulary"):
        build(adapter=str(saved / "policy"), path=path)


def _respell(tokenizer) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last + "x"] = vocabulary.pop(last)
    merges.pop()  # the one that made it
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))


def test_another_chat_template_is_warned_of(build, saved, other, caplog):
    path = other(lambda model, tokenizer: setattr(tokenizer, "chat_template", "{{ messages[0].content }}"))
    with caplog.at_level(logging.WARNING):
        build(adapter=str(saved / "policy"), path=path)
    assert "was trained with another chat template than that of model.path=" in caplog.text


def test_a_file_that_cannot_be_read_is_named(build, saved):
    (saved / "policy" / FILE).write_text("{}")
    with pytest.raises(UserError, match=rf"{FILE} in it cannot be read"):
        build(adapter=str(saved / "policy"))


# ---- adapters on the hub, from its cache ----------------------------------------------------------


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """``cached("org/name", folder)`` puts a folder into an offline hub's cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(name: str, folder: Path) -> None:
        place = tmp_path / "hub" / ("models--" + name.replace("/", "--"))
        shutil.copytree(folder, place / "snapshots" / ("0" * 40))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)

    return put


def test_an_adapter_on_the_hub_is_loaded_as_one_in_a_folder(build, saved, cached):
    cached("someone/adapter", saved / "policy")
    from_hub, from_folder = build(adapter="someone/adapter"), build(adapter=str(saved / "policy"))
    pairs = zip(from_hub.parameters_of("policy"), from_folder.parameters_of("policy"), strict=True)
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in pairs)


def test_a_reward_model_on_the_hub_needs_its_head(build, saved, cached):
    cached("someone/judge", saved / "policy")
    with pytest.raises(UserError, match=r"reward\.path=.* holds an adapter but no score_head"):
        build(reward_path="someone/judge")


def test_a_hub_that_has_no_such_adapter(build, cached, tmp_path):
    sentence = r"model\.adapter=someone/nothing: there is no such folder, and the hub cannot be reached"
    with pytest.raises(UserError, match=sentence):
        build(adapter="someone/nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "backbone.json").touch()
    cached("someone/else", tmp_path / "empty")
    with pytest.raises(UserError, match=r"model\.adapter=someone/else on the hub holds no adapter"):
        build(adapter="someone/else")
