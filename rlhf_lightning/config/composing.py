"""Hydra's composition in this process, and the verdict on one composed job."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.config import overrides, resume
from rlhf_lightning.config.groups import groups
from rlhf_lightning.config.resolve import validate
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

VERSION_BASE = "1.3"


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


def compose_job(
    command: Command, tokens: list[str], forced: list[str], *, known: bool
) -> tuple[DictConfig, list[str]]:
    """Compose as typed; where Hydra balks at a key, force it in, so that the schema gives the verdict."""
    if known:
        try:
            return compose(command.config_name, tokens, return_hydra_config=True), tokens
        except (HydraException, OmegaConfBaseException):
            pass
    try:
        return compose(command.config_name, forced, return_hydra_config=True), forced
    except (HydraException, OmegaConfBaseException) as e:
        raise UserError(overrides.in_one_sentence(e)) from e


def judge_job(cfg: DictConfig, folder: Path) -> Config:
    """The verdict on one job, as if it ran in ``folder``."""
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder.absolute())
        HydraConfig.instance().set_config(cfg)
        job = copy.deepcopy(cfg)
        del job["hydra"]
    return validate(job)


def refuse_used(folder: Path, key: str) -> None:
    """A run writes over nothing."""
    if folder.is_dir() and any(folder.iterdir()):
        hint = (
            f"or continue it with resume={folder}"
            if (folder / resume.RESOLVED).is_file()
            else "or empty this one"
        )
        raise UserError(
            f"{key}={folder} holds files, and a run never writes over them: take another folder, {hint}"
        )
