"""The help page, made from the schema and the config files, so that nothing is typed twice."""

from __future__ import annotations

import textwrap
from pathlib import Path

import yaml
from pydantic_core import PydanticUndefined

from rlhf_lightning.config.describe import ANY, Setting, nearest, rule, settings, show
from rlhf_lightning.config.groups import groups
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

WIDTH = 110
NAME = "NAME"

INTRO = """\
rlhf_lightning: reinforcement learning from human feedback with PPO. One 4-bit language model on one device
plays policy, critic, reference and reward; LoRA adapters are all that trains.

usage: python train.py [GROUP=CHOICE ...] [KEY=VALUE ...]

commands
  python train.py                                  train the embedded tiny model: no network, GPU or account
  python train.py doctor=true                      load everything, prove the set-up, train nothing
  python train.py model=llama7b plan=true          show the memory that it will take, load nothing
  python train.py model=llama7b ppo.clip=0.2       a real model, one number changed
  python train.py -m ppo.beta=0.02,0.05,0.1 ppo.clip=0.1,0.2,0.3
                                                   a sweep: nine runs, a folder each
  python train.py -m --config-name=beta_epsilon    the same, from sweeps/beta_epsilon.yaml
  python train.py experiment=smollm2_sentiment data.path=FILE
                                                   a recipe from conf/experiment (first: make smollm2)
  python train.py resume=outputs/DAY/TIME          continue a run; further KEY=VALUE change it
  python train.py --cfg job                        show the composed settings, run nothing
  python train.py --help ppo                       all keys of a section, or all choices of a group
"""

OUTRO = """\
A run writes into its own folder only, outputs/DAY/TIME (hydra.run.dir=FOLDER for another): settings,
metrics.csv, samples.jsonl, checkpoints, adapters, before_after.json, summary.json.
Hydra's own help: --hydra-help; where a setting comes from: --info defaults.
"""

# What a newcomer changes first; each entry is explained by the schema.
MOST_USED = (
    "seed",
    "model.path",
    "model.quantization",
    "model.dtype",
    "model.lora.r",
    "model.critic",
    "data.path",
    "data.format",
    "data.prompt_field",
    "reward.function",
    "generation.max_new_tokens",
    "generation.temperature",
    "ppo.iterations",
    "ppo.prompts_per_iteration",
    "ppo.epochs",
    "ppo.minibatch_size",
    "ppo.micro_batch_size",
    "ppo.clip",
    "ppo.beta",
    "ppo.kl_target",
    "ppo.lr",
    "ppo.critic_lr",
    "trainer.accelerator",
    "logger.wandb.mode",
)


def page(conf: Path, topic: str | None = None) -> str:
    """The general page, or the one of a section or group.

    Raises:
        UserError: for a topic that is neither.
    """
    offered = groups(conf)
    if topic is None:
        return _general(conf, offered)
    topics = [*Config.model_fields, *(group for group in offered if group not in Config.model_fields)]
    if topic not in topics:
        close = nearest(topic, topics)
        hint = f"; did you mean {close}?" if close else f": there are {', '.join(topics)}"
        raise UserError(f"--help {topic} names no section and no group{hint}")
    return _topic(conf, topic, offered)


def _general(conf: Path, offered: dict[str, list[str]]) -> str:
    chosen = _defaults(conf)
    lines = [INTRO, "choices (GROUP=CHOICE, * is the default; your own: one more yaml in conf/GROUP)"]
    for group, names in offered.items():
        marked = ", ".join(f"{name}*" if name in chosen.get(group, ()) else name for name in names)
        lines.append(_wrap(f"  {group:<12}", marked))
    lines.append(
        "\nkeys most used (KEY=VALUE, default, meaning; presets and model=tiny set some of their own)"
    )
    by_key = {s.key: s for s in settings()}
    lines += [_line(by_key[key]) for key in MOST_USED]
    return "\n".join([*lines, "", OUTRO])


def _topic(conf: Path, topic: str, offered: dict[str, list[str]]) -> str:
    lines = []
    if topic in offered:
        lines.append(f"choices: {topic}=...")
        for name in offered[topic]:
            text = (conf / topic / f"{name}.yaml").read_text(encoding="utf-8")
            comments = [line[1:].strip() for line in text.splitlines() if line.startswith("# ")]
            first = next((line for line in comments if not line.startswith("@package")), "")
            lines.append(_wrap(f"  {name:<18}", first))
        lines.append("")
    repeated = f".{ANY}.reward."  # a part of a combined reward takes what a reward takes
    inside = [s for s in settings() if s.key == topic or s.key.startswith(f"{topic}.")]
    inside = [s for s in inside if repeated not in s.key and not s.key.endswith(".kind")]
    if inside:
        lines.append("keys (KEY=VALUE, default, meaning, what it takes)")
    section = None
    for setting in inside:
        if topic == "reward" and setting.section is not section:
            lines.append(f"  -- {(setting.section.__doc__ or '').splitlines()[0]}")
        section = setting.section
        lines.append(_line(setting, rule(setting.field)))
    if topic == "reward":
        lines.append(
            f"  reward.parts.{NAME}.reward is any other reward, kind named: conf/reward/combined.yaml"
        )
    return "\n".join(lines) + "\n"


def _line(setting: Setting, takes: str | None = None) -> str:
    default = setting.field.get_default(call_default_factory=True)
    value = "(required)" if default is PydanticUndefined else show(default).replace("'", "")
    text = f"{setting.field.description}{f' [{takes}]' if takes else ''}"
    return _wrap(f"  {setting.key.replace(ANY, NAME):<27} {value:<16} ", text)


def _wrap(head: str, text: str) -> str:
    room = " " * len(head)
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=room).rstrip() or head.rstrip()


def _defaults(conf: Path) -> dict[str, set[str]]:
    """What a bare command chooses: the defaults list, and what its model brings."""
    chosen: dict[str, set[str]] = {}
    for entry in yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8"))["defaults"]:
        if isinstance(entry, dict):
            chosen |= {group: {str(name)} for group, name in entry.items()}
    model = conf / "model" / f"{next(iter(chosen['model']))}.yaml"
    for entry in yaml.safe_load(model.read_text(encoding="utf-8"))["defaults"]:
        if isinstance(entry, dict):
            chosen |= {key.removeprefix("override /"): {str(name)} for key, name in entry.items()}
    return chosen
