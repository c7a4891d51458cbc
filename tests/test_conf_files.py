"""Every file below conf/ and sweeps/ composes and validates; what they say agrees with the schema."""

from pathlib import Path

import pytest
import yaml

from rlhf_lightning.config.algorithms import PPOConfig
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.groups import groups
from rlhf_lightning.config.guard import GuardConfig
from rlhf_lightning.config.preflight import plan
from rlhf_lightning.config.schema import Config

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
OFFERED = groups(CONF)
OFFERED["stage"].remove("evaluate")  # it looks at a run: tests/config/test_evaluate_commands.py
REQUIRED = {  # what a file leaves to the user
    "reward=classifier": ["reward.path=folder"],
    "reward=function": ["reward.function=package.module:name"],
    "reward=regex": ["reward.pattern=a"],
    "reward=http": ["reward.url=http://localhost:8000/score"],
    "reward=sentiment": ["reward.parts.learned.reward.path=tiny"],
    "experiment=bench_trl": ["data.path=file", "model.path=tiny", "reward.path=tiny"],
    "experiment=smollm2_reward": ["data.path=file"],
    "experiment=smollm2_sentiment": ["data.path=file"],
    **{f"advantage={name}": ["ppo.samples_per_prompt=4"] for name in ("rloo", "grpo", "dr_grpo")},
    **{f"data={name}": ["data.path=file"] for name in OFFERED["data"] if name != "tiny"},
}
EMBEDDED = ("learned", "combined", "tiny", "sentiment")  # rewards that sit on the embedded model


def judge(line: list[str], name: str = "config"):
    return plan(Command(CONF, line, name)).jobs


def mixed(turn: int) -> list[str]:
    """The turn-th choice of every group at once, so that few commands visit every file."""
    chosen = {group: names[turn % len(names)] for group, names in OFFERED.items() if group != "experiment"}
    if chosen["reward"] in EMBEDDED:
        chosen["model"] = "tiny"
    line = [f"{group}={name}" for group, name in chosen.items()]
    return [*line, *(more for word in line for more in REQUIRED.get(word, []))]


COMMANDS = [mixed(turn) for turn in range(max(map(len, OFFERED.values())))]
VISITED = {word for line in COMMANDS for word in line}
ALONE = [
    [
        f"{group}={name}",
        *REQUIRED.get(f"{group}={name}", []),
        *(["reward=length"] if group == "model" else []),
    ]
    for group, names in OFFERED.items()
    for name in names
    if f"{group}={name}" not in VISITED
]


@pytest.mark.parametrize("line", COMMANDS + ALONE, ids=" ".join)
def test_every_choice_composes_and_validates(line):
    (config,) = judge(line)
    model = next((word.partition("=")[2] for word in line if word.startswith("model=")), None)
    if model is not None:
        assert config.model.name == model


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_composes_and_validates(path):
    params = yaml.safe_load(path.read_text())["hydra"]["sweeper"]["params"]
    expected = 1
    for values in params.values():
        expected *= len(str(values).split(","))
    assert len(judge([], path.stem)) == expected


def test_the_baselines_differ_in_their_estimator_alone():
    jobs = judge([], "baselines")
    found = [(c.advantage.kind, getattr(c.advantage, "scale", None), c.ppo.loss_average) for c in jobs]
    assert found == [
        ("gae", None, "token"),
        ("reinforce", None, "token"),
        ("reinforce_plus_plus", None, "token"),
        ("rloo", None, "token"),
        ("grpo", True, "response"),
        ("grpo", False, "constant"),
    ]
    others = [c.model_copy(update={"advantage": None, "ppo": None}) for c in jobs]
    assert all(c == others[0] for c in others)
    assert {(c.ppo.iterations, c.ppo.responses, c.ppo.samples_per_prompt) for c in jobs} == {(14, 64, 4)}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "sweeps" / "wandb").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_tracker_sweep_names_settings_that_exist(path):
    sweep = yaml.safe_load(path.read_text())
    line = [word for word in sweep["command"] if "=" in word]
    for value in (0, -1):
        judge([*line, *(f"{key}={p['values'][value]}" for key, p in sweep["parameters"].items())])
    assert (ROOT / sweep["program"]).is_file()
    assert judge([f"objective={sweep['metric']['name']}"])[0].objective == sweep["metric"]["name"]


def test_the_default_numbers_are_those_of_the_schema():
    written = yaml.safe_load((CONF / "ppo" / "default.yaml").read_text())
    assert PPOConfig.model_validate(written) == PPOConfig()
    assert set(written) == set(PPOConfig.model_fields)


def test_the_default_limits_are_those_of_the_schema_and_none_watches_nothing():
    written = yaml.safe_load((CONF / "guard" / "default.yaml").read_text())
    assert GuardConfig.model_validate(written) == GuardConfig()
    assert set(written) == set(GuardConfig.model_fields)
    (none,) = judge(["guard=none"])
    assert set(none.guard.model_dump(exclude={"action", "window"}).values()) == {None}


@pytest.mark.parametrize("section", ["model", "data"])
def test_shared_fragments_list_every_setting(section):
    written = yaml.safe_load((CONF / section / "_defaults.yaml").read_text())
    assert set(written) == set(Config.model_fields[section].annotation.model_fields)


@pytest.mark.parametrize("name", OFFERED["model"])
def test_every_model_says_what_is_special(name):
    text = (CONF / "model" / f"{name}.yaml").read_text()
    comments = [line for line in text.splitlines() if line.startswith("# ") and "@package" not in line]
    assert len(comments[0]) > 10
    assert "target_modules: [" in text


def test_the_sentiment_recipe():
    (config,) = judge(["experiment=smollm2_sentiment", "data.path=reviews.txt"])
    assert config.model.path.endswith("rlhf_lightning/smollm2-135m-instruct")
    assert (config.model.quantization, config.model.dtype) == ("nf4", "float32")
    assert (config.data.format, config.data.first_words, config.data.path) == ("text", 4, "reviews.txt")
    assert config.reward.function == "rlhf_lightning.rewards.vader:sentiment"
    assert (config.ppo.responses, config.generation.max_new_tokens) == (64, 24)
    assert config.ppo.iterations <= 30


def test_debug_is_small():
    (config,) = judge(["debug=default"])
    assert (config.ppo.iterations, config.ppo.responses, config.generation.max_new_tokens) == (2, 8, 8)


def test_wandb_is_offline_unless_asked():
    assert judge([])[0].logger.wandb.mode == "offline"
    assert judge(["logger=none"])[0].logger.wandb is None
