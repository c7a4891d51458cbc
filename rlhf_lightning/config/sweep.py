"""The jobs of a sweep, all judged before the first one starts."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.config import overrides
from rlhf_lightning.config.composing import Command, compose_job, judge_job, offered, refuse_used
from rlhf_lightning.config.resolve import report
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError


def judge_sweep(command: Command, words: overrides.Words, base: DictConfig) -> tuple[Command, list[Config]]:
    """Judge every job.

    Args:
        words: the command line, read.
        base: the config without what is swept over.
    Returns:
        The command as Hydra is given it, and the jobs' settings.
    Raises:
        UserError: naming each job with a fault; nothing has been started then.
    """
    sweep_dir = Path(str(base.hydra.sweep.dir))
    refuse_used(sweep_dir, "hydra.sweep.dir")
    params = OmegaConf.to_container(base.hydra.sweeper.get("params") or OmegaConf.create({}))
    assert isinstance(params, dict)
    listed = [f"{key!s}={value}" for key, value in params.items()]
    extra = overrides.read(listed, offered(command))
    if extra.faults:
        raise UserError(report(extra.faults))
    known = not (words.unknown or extra.unknown)
    tokens, forced = _expand([*listed, *words.tokens]), _expand([*extra.forced, *words.forced])
    first, used = compose_job(command, tokens[0], forced[0], known=known)
    as_typed = used is tokens[0]
    alike = copy.deepcopy(first)
    varying = _varying(tokens)
    structural = any(not key[0].isalpha() or key in offered(command) for key in varying)
    jobs: list[Config] = []
    verdicts: list[tuple[list[str], str]] = []
    for number, (one, other) in enumerate(zip(tokens, forced, strict=True)):
        cfg = first
        if number and structural:
            cfg, used = compose_job(command, one, other, known=known)
            as_typed = as_typed and used is one
        elif number:
            cfg = _changed(alike, [word for word in one if word.partition("=")[0] in varying])
        try:
            jobs.append(judge_job(cfg, sweep_dir / str(number)))
        except UserError as e:
            verdicts.append((one, str(e)))
    if verdicts:
        raise UserError(_refused(verdicts, len(tokens)))
    return replace(command, tokens=words.tokens if as_typed else words.forced), jobs


def _varying(jobs: list[list[str]]) -> set[str]:
    """The keys in which jobs differ."""
    return {words[0].partition("=")[0] for words in zip(*jobs, strict=True) if len(set(words)) > 1}


def _changed(cfg: DictConfig, words: list[str]) -> DictConfig:
    """A composed config with the plain values of another job, a tenth of the time of composing it."""
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_struct(cfg, False)
    for parsed in OverridesParser.create().parse_overrides(words):
        OmegaConf.update(cfg, parsed.key_or_group, parsed.value(), force_add=True)
    return cfg


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
