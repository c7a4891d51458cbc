"""Composing and judging a command before anything is written or heavy is loaded."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.config import overrides, resume
from rlhf_lightning.config.groups import groups
from rlhf_lightning.config.resolve import judge, plain, report, validate
from rlhf_lightning.config.rules import Fault
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

VERSION_BASE = "1.3"
RESUMED = "resumed"  # name of the config that stands for an earlier run


class MoreFolders(SearchPathPlugin):
    """Puts ``sweeps/`` and what ``--config-dir`` names on Hydra's search path."""

    folders: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.append(provider="rlhf_lightning", path=f"file://{folder}")


@dataclass(frozen=True)
class Command:
    """What the user asked for."""

    conf: Path
    tokens: list[str]
    config_name: str = "config"
    multirun: bool = False
    more: tuple[Path, ...] = ()
    launch: Path = field(default_factory=Path.cwd)


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
        return _sweep(command, words, base)


def register_folders(command: Command) -> None:
    """Tell Hydra of the folders beside ``conf``."""
    MoreFolders.folders = (*command.more, command.conf.parent / "sweeps")
    Plugins.instance().register(MoreFolders)


@contextmanager
def search_path(command: Command) -> Iterator[None]:
    """Hydra set up for in-process composition, and left as it was."""
    register_folders(command)
    before = HydraConfig.instance().cfg
    with initialize_config_dir(config_dir=str(command.conf), version_base=VERSION_BASE):
        try:
            yield
        finally:
            HydraConfig.instance().cfg = before


def offered(command: Command) -> dict[str, list[str]]:
    """Groups and words that this command may choose from."""
    return groups(command.conf, *command.more)


def _continue(command: Command, given: str) -> Command:
    run = resume.load(given, launch=command.launch)
    node = {"defaults": [{"hydra": "default"}, "_self_"], **run.values}
    ConfigStore.instance().store(name=RESUMED, node=OmegaConf.create(node))
    place = [f"hydra.run.dir={overrides.quoted(run.folder)}", "hydra.output_subdir=null"]
    tokens = [*command.tokens, f"++resume={overrides.quoted(run.folder)}", *place]
    return replace(command, tokens=tokens, config_name=RESUMED)


def _compose(command: Command, tokens: list[str]) -> DictConfig:
    try:
        return compose(command.config_name, tokens, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as e:
        raise UserError(overrides.in_one_sentence(e)) from e


def _try(
    command: Command, tokens: list[str], forced: list[str], *, known: bool
) -> tuple[DictConfig, list[str]]:
    """Compose as typed; where Hydra balks at a key, force it in, so that the schema gives the verdict."""
    if known:
        try:
            return compose(command.config_name, tokens, return_hydra_config=True), tokens
        except (HydraException, OmegaConfBaseException):
            pass
    return _compose(command, forced), forced


def _base(command: Command, words: overrides.Words) -> tuple[DictConfig, list[str]]:
    """The config without what is swept over: it tells the mode and the sweeper's own parameters."""
    swept = set(words.sweeps)
    pairs = [(t, f) for t, f in zip(words.tokens, words.forced, strict=True) if t not in swept]
    return _try(command, [t for t, _ in pairs], [f for _, f in pairs], known=not words.unknown)


def _single(command: Command, base: DictConfig, *, fresh: bool) -> Plan:
    config = _judge(base, Path(str(base.hydra.run.dir)))
    if fresh:
        _refuse_used(Path(str(base.hydra.run.dir)), "hydra.run.dir")
    return Plan(command, [config], False, _notes(command, base, config))


def _sweep(command: Command, words: overrides.Words, base: DictConfig) -> Plan:
    _refuse_used(Path(str(base.hydra.sweep.dir)), "hydra.sweep.dir")
    params = OmegaConf.to_container(base.hydra.sweeper.get("params") or OmegaConf.create({}))
    assert isinstance(params, dict)
    listed = [f"{key!s}={value}" for key, value in params.items()]
    extra = overrides.read(listed, offered(command))
    if extra.faults:
        raise UserError(report(extra.faults))
    known = as_typed = not (words.unknown or extra.unknown)
    jobs: list[Config] = []
    verdicts: list[tuple[list[str], str]] = []
    notes: list[str] = []
    tokens, forced = [*listed, *words.tokens], [*extra.forced, *words.forced]
    for one, other in zip(_expand(tokens), _expand(forced), strict=True):
        cfg, used = _try(command, one, other, known=known)
        as_typed = as_typed and used is one
        try:
            jobs.append(_judge(cfg, Path(str(base.hydra.sweep.dir)) / str(len(jobs))))
            notes = notes or _notes(command, cfg, jobs[-1])
        except UserError as e:
            verdicts.append((one, str(e)))
    if verdicts:
        total = len(jobs) + len(verdicts)
        raise UserError(_refused(verdicts, total))
    return Plan(replace(command, tokens=words.tokens if as_typed else words.forced), jobs, True, notes)


def _refused(verdicts: list[tuple[list[str], str]], total: int) -> str:
    texts = list(dict.fromkeys(text for _, text in verdicts))
    if len(texts) == 1 and len(verdicts) == total:
        return texts[0]
    lines = [f"  - {' '.join(job)}: {text}" for job, text in verdicts]
    return f"nothing was started: {len(verdicts)} of {total} jobs of this sweep have faults\n" + "\n".join(
        lines
    )


def _expand(tokens: list[str]) -> list[list[str]]:
    """Every job of the basic sweeper: the product over the swept keys, later words before earlier ones."""
    from hydra.core.global_hydra import GlobalHydra

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    options: dict[str, list[str]] = {}
    for parsed in parser.parse_overrides(tokens):
        key = parsed.get_key_element()
        if parsed.is_discrete_sweep():
            options[key] = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
        elif parsed.is_sweep_override():
            raise UserError(f"{parsed.input_line} asks for another sweeper: the one here takes lists, a,b,c")
        else:
            options[key] = [f"{key}={parsed.get_value_element_as_str()}"] if not parsed.is_delete() else [key]
    return [list(job) for job in itertools.product(*options.values())]


def _judge(cfg: DictConfig, folder: Path) -> Config:
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder.absolute())
        HydraConfig.instance().set_config(cfg)
        job = copy.deepcopy(cfg)
        del job["hydra"]
    return validate(job)


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


def _refuse_used(folder: Path, key: str) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        hint = (
            f"or continue it with resume={folder}"
            if (folder / resume.RESOLVED).is_file()
            else "or empty this one"
        )
        raise UserError(
            f"{key}={folder} holds files, and a run never writes over them: take another folder, {hint}"
        )


def _notes(command: Command, cfg: DictConfig, config: Config) -> list[str]:
    """What was chosen in the user's place."""
    chosen = any(
        token.lstrip("+").split("=")[0].split(".")[0] in ("reward", "experiment") for token in command.tokens
    )
    if config.reward.kind != "length" or chosen or command.config_name == RESUMED:
        return []
    return [
        f"note: reward=length (answers of about {config.reward.target} words) stands in, since the embedded "
        "reward model fits only model=tiny; choose yours with reward=..., see python train.py --help reward"
    ]
