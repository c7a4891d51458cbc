"""The schema itself: documented, strict about kinds, counted in the right unit, and read by someone."""

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_lightning.config.algorithms import PPOConfig
from rlhf_lightning.config.describe import ANY, known, nearest, nearest_key, rule, settings, show
from rlhf_lightning.config.paths import cache_dir
from rlhf_lightning.config.resolve import expand, validate
from rlhf_lightning.config.schema import Config, DataConfig
from rlhf_lightning.errors import UserError

PACKAGE = Path(__file__).resolve().parents[2] / "rlhf_lightning"
BARE = {"reward": {"kind": "length", "target": 3}}


def test_every_setting_says_what_it_means():
    silent = [s.key for s in settings() if not s.field.description]
    silent += [name for name, field in Config.model_fields.items() if not field.description]
    assert silent == []


def test_the_horizon_is_counted_in_optimizer_steps():
    """Fault 61: 10 rollouts of 64 answers, minibatches of 16 and 4 epochs are 160 updates, 16 a rollout."""
    ppo = PPOConfig(
        iterations=10, prompts_per_iteration=32, samples_per_prompt=2, minibatch_size=16, epochs=4
    )
    assert (ppo.responses, ppo.steps_per_iteration, ppo.total_steps) == (64, 16, 160)


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "1E-5", " 0.00001 "])
def test_numbers_given_as_text_become_numbers(text):
    assert PPOConfig.model_validate({"lr": text}).lr == 1e-5


@pytest.mark.parametrize("value", [True, False, "ten", "", None, "nan", float("inf")])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValidationError):
        PPOConfig.model_validate({"lr": value})


def test_an_integer_will_do_for_a_text():
    assert DataConfig.model_validate({"prompt_field": 3}).prompt_field == "3"


def test_rules_in_words():
    words = {s.key: rule(s.field) for s in settings() if ANY not in s.key}
    assert words["ppo.gamma"] == "a number at least 0 and at most 1"
    assert words["ppo.clip_high"] == "a number above 0 or null"
    assert words["data.limit"] == "a whole number at least 1 or null"
    assert words["model.quantization"] == "nf4 or none"
    assert words["stage.name"] == "sft, reward, ppo, dpo, evaluate or pipeline"
    assert words["callbacks.progress"] == "true or false"


def test_values_are_shown_as_typed():
    shown = [show(v) for v in (None, True, False, "a", "", [1, 2], {"a": 1}, 0.5)]
    assert shown == ["null", "true", "false", "'a'", "empty", "[1,2]", "a section", "0.5"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("ppo.clp", "ppo.clip"),
        ("clip", "ppo.clip"),
        ("model.lora_r", "model.lora"),
        ("model.lora.rr", "model.lora.r"),
        ("ppo.learning_rate", "ppo.lr"),
        ("generation.max_length", "generation.max_new_tokens"),
        ("iteratons", "ppo.iterations"),
        ("qqqqqqqq", None),
    ],
)
def test_the_nearest_key(wrong, right):
    found = nearest_key(wrong)
    assert found == right or (right == "model.lora" and found is not None and found.startswith("model."))


def test_known_keys():
    assert known("ppo.clip") and known("ppo") and known("reward.parts.mine.weight") and known("reward.target")
    assert not known("ppo.clp") and not known("reward.parts.mine.wait") and not known("ppo.clip.more")
    assert nearest("zzz", ["abc"]) is None


def test_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cache_dir() == tmp_path / "cache" / "rlhf_lightning"
    assert expand("~/.cache/rlhf_lightning/m") == str(tmp_path / "cache" / "rlhf_lightning" / "m")
    assert expand("~/m") == str(tmp_path / "m")
    assert expand("org/model") == "org/model"
    for name in ("here", "tiny"):
        (tmp_path / name).mkdir()
    assert expand("here") == str(tmp_path / "here")
    assert expand("tiny") == "tiny"


def test_a_plain_mapping_is_judged_as_well():
    assert validate(BARE).reward.kind == "length"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "reward is required"),
        ({"reward": {"target": 3}}, "reward.kind must be one of learned, classifier"),
        ({"reward": 3}, "reward must be a section"),
        ({**BARE, "ppo": 3}, "ppo must be a section"),
        ({"reward": {"kind": "length"}}, "reward.target is required (words): give reward.target=VALUE"),
        (
            {"reward": {"kind": "combined", "parts": {"a": {"reward": {"kind": "length", "target": 0}}}}},
            "reward.parts.a.reward.target must be a whole number at least 1, not 0",
        ),
        ({"reward": {"kind": "combined", "parts": {}}}, "reward.parts must be"),
        ({"reward": {"kind": "combined", "parts": 3}}, "reward.parts must be a section"),
        (
            {**BARE, "data": {"path": "${oc.env:MY_SECRET}"}, "generation": {"stop": ["${oc.env:API_KEY}"]}},
            "data.path must not take ${oc.env:MY_SECRET}",
        ),
        ({**BARE, "generation": {"stop": ["${nothing}"]}}, "generation.stop[0] cannot be resolved"),
    ],
)
def test_faults_of_a_whole_config(values, sentence):
    with pytest.raises(UserError) as caught:
        validate(values)
    assert sentence in str(caught.value)


# Settings whose reader is not written yet; the list may only shrink.
UNREAD: set[str] = set()


def test_every_setting_is_read_by_someone():
    """A knob that nothing reads is removed the day it dies."""
    files = [p for p in PACKAGE.rglob("*.py") if p.parent.name != "config"]
    read = {
        node.attr
        for p in files
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.Attribute)
    }
    names = {s.key.rsplit(".", 1)[-1] for s in settings()} - {"kind", "name"}
    names -= {"objective", "plan"}  # read in the config itself: by Config.target, and by the command line
    dead = {name for name in names - read if name not in UNREAD}
    assert dead == set()
