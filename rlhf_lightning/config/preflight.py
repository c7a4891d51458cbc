"""Composing and judging a command before anything is written or heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.config import overrides, resume
from rlhf_lightning.config.composing import Command, compose_job, judge_job, offered, refuse_used, search_path
from rlhf_lightning.config.locate import locate
from rlhf_lightning.config.resolve import judge, plain, report
from rlhf_lightning.config.rules import Fault
from rlhf_lightning.config.schema import Config
from rlhf_lightning.config.sweep import judge_sweep
from rlhf_lightning.errors import UserError

RESUMED = "resumed"  # name of the config that stands for an earlier run
EVALUATED = "evaluated"  # and of the one that looks at it
INHERITED = ("seed", "model", "data", "reward", "generation", "ppo", "trainer")  # what it takes from it


@dataclass(frozen=True)
class Plan:
    """A judged command: what Hydra is given, and what the user should know before it starts."""

    command: Command
    jobs: list[Config]
    multirun: bool
    notes: list[str]


def plan(command: Command) -> Plan:
    """Compose every job of a command and judge it.

    Raises:
        UserError: for whatever is wrong with it, all faults at once.
    """
    given, tokens = resume.split(command.tokens)
    command = replace(command, tokens=tokens)
    if given is not None:
        command = _continue(command, given)
    elif "stage=evaluate" in command.tokens:
        run, tokens = resume.split(command.tokens, "run")
        command = command if run is None else _look_at(replace(command, tokens=tokens), run)
    with search_path(command):
        words = overrides.read(command.tokens, offered(command), resuming=given is not None)
        if words.faults:
            unknown = [] if given is not None else _unknown(words)
            raise UserError(report([*words.faults, *unknown]))
        command = replace(command, tokens=words.tokens)
        base, used = _base(command, words)
        multirun = command.multirun or "MULTIRUN" in str(base.hydra.mode)
        if multirun and given is not None:
            raise UserError(f"resume={given} continues one run: leave out -m")
        if words.sweeps and not multirun:
            raise UserError(report(_several(token) for token in words.sweeps))
        if not multirun:
            return _single(replace(command, tokens=used), base, fresh=given is None)
        judged, jobs = judge_sweep(command, words, base)
        return Plan(judged, jobs, True, _notes(command, jobs[0]))


def _continue(command: Command, given: str) -> Command:
    run = resume.load(given, launch=command.launch)
    node = {"defaults": [{"hydra": "default"}, "_self_"], **run.values}
    ConfigStore.instance().store(name=RESUMED, node=OmegaConf.create(node))
    place = [f"hydra.run.dir={overrides.quoted(run.folder)}", "hydra.output_subdir=null"]
    tokens = [*command.tokens, f"++resume={overrides.quoted(run.folder)}", *place]
    return replace(command, tokens=tokens, config_name=RESUMED)


def _look_at(command: Command, given: str) -> Command:
    """``stage=evaluate run=...``: a new run with the earlier one's model, data, reward and the like.

    What the command line says wins: single keys, and a choice of a group, which replaces the run's section.
    """
    run = resume.load(given, key="run", launch=command.launch)
    names = {token.lstrip("+").partition("=")[0] for token in command.tokens}
    if "experiment" in names:
        raise UserError("experiment=... does not go with run=...: the run brings its own settings")
    kept = {key: run.values[key] for key in INHERITED if key in run.values and key not in names}
    primary = yaml.safe_load((command.conf / "config.yaml").read_text(encoding="utf-8"))
    defaults = [_instead_of(entry, kept) for entry in primary.pop("defaults")]
    place = given if Path(given).name == "policy" else str(run.folder)
    node = {"defaults": defaults, **primary, **kept, "run": str(Path(place).expanduser().absolute())}
    ConfigStore.instance().store(name=EVALUATED, node=OmegaConf.create(node))
    return replace(command, config_name=EVALUATED)


def _instead_of(entry: Any, kept: dict[str, Any]) -> Any:
    """An entry of the defaults list, without the choice whose section is kept from the run."""
    if not isinstance(entry, dict):
        return entry
    ((group, choice),) = entry.items()
    return {group: None if group in kept else "evaluate" if group == "stage" else choice}


def _base(command: Command, words: overrides.Words) -> tuple[DictConfig, list[str]]:
    """The config without what is swept over: it tells the mode and the sweeper's own parameters."""
    swept = set(words.sweeps)
    pairs = [(t, f) for t, f in zip(words.tokens, words.forced, strict=True) if t not in swept]
    return compose_job(command, [t for t, _ in pairs], [f for _, f in pairs], known=not words.unknown)


def _single(command: Command, base: DictConfig, *, fresh: bool) -> Plan:
    config = judge_job(base, Path(str(base.hydra.run.dir)))
    if fresh:
        refuse_used(Path(str(base.hydra.run.dir)), "hydra.run.dir")
    return Plan(command, [config], False, _notes(command, config))


def _unknown(words: overrides.Words) -> list[Fault]:
    """Unknown keys beside other faults, so that one run of the command shows them all."""
    values: dict[str, Any] = {"reward": {"kind": "length", "target": 1}}
    node = OmegaConf.create(values)
    for key in words.unknown:
        OmegaConf.update(node, key, 0, force_add=True)
    return [fault for fault in judge(plain(node)[0])[1] if fault.keys[0] in words.unknown]


def _several(token: str) -> Fault:
    key, _, value = token.partition("=")
    return Fault(
        (key,),
        f"{token} gives several values: add -m to run each of them, or write {key}=[{value}] for a list",
    )


def _notes(command: Command, config: Config) -> list[str]:
    """What was chosen in the user's place."""
    chosen = any(
        token.lstrip("+").split("=")[0].split(".")[0] in ("reward", "experiment") for token in command.tokens
    )
    if command.config_name == EVALUATED and config.run is not None:
        found = locate(config.run, key="run", want="policy")
        cut_short = found.kind == "run" and ", finished)" not in found.text
        return [f"note: {found.text} is judged as it stands: the run did not finish"] if cut_short else []
    if config.reward.kind != "length" or chosen or command.config_name == RESUMED:
        return []
    return [
        f"note: reward=length (answers of about {config.reward.target} words) stands in, since the embedded "
        "reward model fits only model=tiny; choose yours with reward=..., see python train.py --help reward"
    ]
