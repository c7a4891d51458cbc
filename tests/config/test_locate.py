"""What a path leads to, by the files that lie there; every wrong one gets its sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.config.locate import locate, named_paths, refuse_another_shape
from rlhf_lightning.config.rules import paths_hold_what_is_wanted
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError


def adapter(folder: Path, *, head: str | None = None, base: str | None = "org/base") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    if head is not None:
        (folder / f"{head}_head.safetensors").touch()
    return folder


def model(folder: Path, **settings) -> Path:
    folder.mkdir(parents=True)
    settings = {"model_type": "llama", "hidden_size": 64, "architectures": ["LlamaForCausalLM"]} | settings
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def run(tmp_path: Path):
    """``run("name", stage=..., status=..., roles=...) -> folder`` of a run that ended in that way."""

    def make(
        name: str = "run",
        *,
        stage: str = "sft",
        status: str | None = "finished",
        roles: tuple[str, ...] = ("policy",),
        reward: dict | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        reward = reward or {"kind": "length", "target": 3}
        settings = {"stage": {"name": stage}, "model": {"path": "/models/seven"}, "reward": reward}
        (folder / "config_resolved.yaml").write_text(yaml.safe_dump(settings))
        if status is not None:
            ending = {"status": status, "error": None if status == "finished" else "out of luck\nmore"}
            (folder / "summary.json").write_text(
                json.dumps(ending | {"iterations": 3, "total_iterations": 9})
            )
        for role in roles:
            heads = {"reward": "score", "critic": "value"}
            adapter(folder / "adapters" / role, head=heads.get(role))
        return folder

    return make


def test_a_run_is_named_with_its_stage_and_end(run):
    folder = run(roles=("critic", "policy"), stage="ppo")
    found = locate(str(folder), key="model.adapter", want="policy")
    assert (found.kind, found.folder, found.base) == (
        "run",
        str(folder / "adapters" / "policy"),
        "/models/seven",
    )
    assert found.text == f"model.adapter: run {folder} (stage ppo, finished), its policy adapter"
    inside = locate(str(folder / "adapters"), key="model.adapter", want="policy")
    assert inside.folder == found.folder
    direct = locate(str(folder / "adapters" / "policy"), key="model.adapter", want="policy")
    assert (direct.kind, direct.folder) == ("adapter", found.folder)


def test_a_reward_run_is_found_for_a_reward(run):
    folder = run(stage="reward", roles=("reward",))
    found = locate(str(folder), key="reward.path", want="reward")
    assert found.folder == str(folder / "adapters" / "reward")
    assert "(stage reward, finished), its reward adapter with its score head" in found.text


def test_what_an_interrupted_run_has_is_taken_and_said(run):
    text = locate(str(run(status="interrupted")), key="model.adapter", want="policy").text
    assert "interrupted after 3 of 9 iterations" in text


@pytest.mark.parametrize(
    ("made", "key", "want", "sentence"),
    [
        ({"status": None}, "model.adapter", "policy", "never finished: it has no summary.json"),
        ({"status": "failed", "roles": ()}, "model.adapter", "policy",
         "never finished: it failed and left no adapters (out of luck)"),
        ({"status": "interrupted", "roles": ()}, "model.adapter", "policy", "it was interrupted and left no"),
        ({"stage": "reward", "roles": ("reward",)}, "model.adapter", "policy",
         "holds a reward model, not a policy: it is a run of stage=reward; use reward.path="),
        ({}, "reward.path", "reward",
         "holds a policy, not a reward model: it is a run of stage=sft; use model.adapter="),
        ({"stage": "ppo", "reward": {"kind": "learned", "path": "/rm"}}, "reward.path", "reward",
         "it is a run of stage=ppo; its own reward was reward.path=/rm"),
        ({}, "model.path", "model", "is a run (stage sft), not a whole model: use model.path=/models/seven "
         "model.adapter="),
        ({"stage": "evaluate", "roles": ()}, "run", "policy",
         "is a run of stage=evaluate, which left no policy adapter"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_a_run_that_does_not_serve(run, made, key, want, sentence):
    folder = run(**made)
    with pytest.raises(UserError) as caught:
        locate(str(folder), key=key, want=want)
    assert str(caught.value).startswith(f"{key}={folder} ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_reward_adapter_without_its_head_is_no_reward_model(run, tmp_path):
    folder = run(stage="reward", roles=("reward",))
    (folder / "adapters" / "reward" / "score_head.safetensors").unlink()
    for path in (folder, folder / "adapters" / "reward"):
        with pytest.raises(
            UserError, match=r"reward\.path=.* holds an adapter but no score_head\.safetensors"
        ):
            locate(str(path), key="reward.path", want="reward")


def test_a_pipelines_folder_names_its_stages(run, tmp_path):
    outer = run("outer", stage="pipeline", status=None, roles=())
    for name in ("sft", "ppo"):
        (outer / name).mkdir()
        (outer / name / "config_resolved.yaml").touch()
    with pytest.raises(UserError, match=r"is a run of several stages: name one of them, .*outer/ppo\|sft"):
        locate(str(outer), key="model.adapter", want="policy")


@pytest.mark.parametrize(("head", "what"), [("score", "reward model"), ("value", "critic")])
def test_an_adapter_that_judges_is_no_policy(tmp_path, head, what):
    folder = adapter(tmp_path / "a", head=head)
    with pytest.raises(UserError, match=f"holds a {what}, not a policy"):
        locate(str(folder), key="model.adapter", want="policy")


def test_a_folder_of_peft_names_the_model_it_was_made_for(tmp_path):
    folder = adapter(tmp_path / "a")
    found = locate(str(folder), key="model.adapter", want="policy")
    assert (found.kind, found.base) == ("adapter", "org/base")
    assert found.text == f"model.adapter: policy adapter {folder}, made for org/base"
    assert locate(str(adapter(tmp_path / "b", base=None)), key="k", want="policy").base is None
    with pytest.raises(UserError, match=r"is an adapter, not a whole model: use model\.path=org/base model"):
        locate(str(folder), key="model.path", want="model")


def test_a_base_beside_the_adapter_is_found_from_anywhere(tmp_path):
    beside = model(tmp_path / "model")
    found = locate(str(adapter(tmp_path / "a", base="../model")), key="k", want="policy")
    assert found.base == str(beside)


def test_a_whole_model_is_no_adapter(tmp_path):
    folder = model(tmp_path / "m")
    assert locate(str(folder), key="model.path", want="model").kind == "model"
    with pytest.raises(UserError, match=rf"is a whole model \(LlamaForCausalLM\).*use model\.path={folder}"):
        locate(str(folder), key="model.adapter", want="policy")
    with pytest.raises(UserError, match=rf"use reward=classifier reward\.path={folder}"):
        locate(str(folder), key="reward.path", want="reward")


@pytest.mark.parametrize(
    ("path", "want", "sentence"),
    [
        ("nowhere", "policy", "model.adapter=nowhere: there is no such folder, and no hub id, OWNER/NAME"),
        ("./a/b", "policy", "there is no such folder, and no hub id"),
        ("here/b", "policy", "model.adapter=here/b: there is no such folder"),
        (
            "here",
            "policy",
            "model.adapter=here is a folder with none of config_resolved.yaml (a run), adapter_",
        ),
        ("here/file", "policy", "model.adapter=here/file is a file: name the folder that holds it"),
        ("tiny", "policy", "there is no embedded policy adapter"),
    ],
)
def test_what_is_nothing(tmp_path, monkeypatch, path, want, sentence):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        locate(path, key="model.adapter", want=want)
    assert sentence in str(caught.value)


def test_a_folder_of_runs_names_the_newest(run, tmp_path):
    folder = run()
    with pytest.raises(UserError, match=f"the newest run in it is {folder}"):
        locate(str(tmp_path), key="model.adapter", want="policy")


def test_a_hub_id_is_taken_as_it_is():
    found = locate("someone/some-adapter", key="model.adapter", want="policy")
    assert (found.kind, found.folder) == ("hub", "someone/some-adapter")
    assert locate("gpt2", key="model.path", want="model").kind == "hub"


@pytest.mark.parametrize("text", ["{", "[]"])
def test_files_that_cannot_be_read(run, text):
    folder = run()
    (folder / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.adapter=.*summary\.json"):
        locate(str(folder), key="model.adapter", want="policy")
    (folder / "config_resolved.yaml").write_text("a: [" if text == "{" else "- 1")
    with pytest.raises(UserError, match=r"model\.adapter=.*config_resolved\.yaml"):
        locate(str(folder), key="model.adapter", want="policy")


def test_the_base_may_lie_elsewhere_but_not_have_another_shape(tmp_path):
    first, moved = model(tmp_path / "first"), model(tmp_path / "moved")
    other = model(tmp_path / "other", hidden_size=128)
    found = locate(str(adapter(tmp_path / "a", base=str(first))), key="k", want="policy")
    refuse_another_shape(found, str(moved), at="model.adapter=a")
    refuse_another_shape(found, "someone/elsewhere", at="model.adapter=a")
    with pytest.raises(
        UserError, match=r"model\.adapter=a was made for another model: .*first has hidden_size=64"
    ):
        refuse_another_shape(found, str(other), at="model.adapter=a")


def test_a_config_is_judged_by_what_its_paths_hold(run, tmp_path):
    sft, rm = run("sft"), run("rm", stage="reward", roles=("reward",))
    reward = {"kind": "learned", "path": str(rm)}

    def judged(**settings) -> list[str]:
        return [f.text for f in paths_hold_what_is_wanted(Config.model_validate(settings))]

    good = {"model": {"path": "org/base", "adapter": str(sft)}, "reward": reward}
    assert judged(**good) == []
    assert [key for key, _, _ in named_paths(Config.model_validate(good))] == ["model.adapter", "reward.path"]
    crossed = {"model": {"path": "org/base", "adapter": str(rm)}, "reward": reward | {"path": str(sft)}}
    assert [text.split("=")[0] for text in judged(**crossed)] == ["model.adapter", "reward.path"]
    assert "is a run (stage sft)" in judged(**good | {"model": {"path": str(sft)}})[0]
