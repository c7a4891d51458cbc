"""From a composed config to a validated one: resolved once, judged once, all faults in one message."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlhf_lightning.config.describe import known, nearest_key, rule, sections, settings, show
from rlhf_lightning.config.paths import cache_dir
from rlhf_lightning.config.rules import RULES, Fault
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SECRET = re.compile(r"\$\{\s*oc\.env:\s*(\w*(?:TOKEN|KEY|SECRET|PASSW)\w*)", re.IGNORECASE)
PATHS = (
    "model.path",
    "model.adapter",
    "data.path",
    "data.held_out",
    "reward.path",
    "evaluate.against",
)


def validate(config: DictConfig | Mapping[str, Any]) -> Config:
    """Judge a whole composed config.

    Args:
        config: the composed config without its ``hydra`` node; interpolations are resolved here, once.
    Returns:
        The frozen config of plain values, paths made absolute where they exist.
    Raises:
        UserError: naming every fault at once, each by key, rule, value and nearest valid key.
    """
    values, faults = plain(config)
    judged, more = judge(values)
    reported = {key for fault in faults for key in fault.keys}
    faults += [fault for fault in more if reported.isdisjoint(fault.keys)]
    if faults or judged is None:
        raise UserError(report(faults))
    return judged


def report(faults: Iterable[Fault]) -> str:
    """One sentence for one fault, a list for several."""
    lines = list(dict.fromkeys(fault.text for fault in faults))
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} faults in the configuration:\n" + "\n".join(f"  - {line}" for line in lines)


def plain(config: DictConfig | Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Plain values of a composed config, and what could not be had: missing values, broken interpolations."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node: Any = copy.deepcopy(config) if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
    OmegaConf.set_readonly(node, False)
    OmegaConf.set_struct(node, False)
    raw = OmegaConf.to_container(node, resolve=False)
    faults = [_secret(key, name) for key, name in _secrets(raw, "")]
    for fault in faults:
        _remove(node, fault.keys[0])
    for key in _missing(raw, ""):
        faults.append(Fault((key,), f"{key} is required ({_explain(key)}): give {key}=VALUE"))
        _remove(node, key)
    while True:
        try:
            values = OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException as e:
            key = str(e.full_key)
            why = str(e).splitlines()[0]
            faults.append(Fault((key,), f"{key} cannot be resolved: {why}"))
            _remove(node, key)
            continue
        assert isinstance(values, dict)
        return {str(k): v for k, v in values.items()}, faults


def judge(values: dict[str, Any]) -> tuple[Config | None, list[Fault]]:
    """Schema first, then the rules between settings, on whatever part of the config can be judged."""
    faults: list[Fault] = []
    try:
        config: Config | None = Config.model_validate(_paths(values))
    except ValidationError as e:
        errors = e.errors(include_url=False)
        faults = _translate(errors, values)
        config = _without(errors, values)
    wrong = {key for fault in faults for key in fault.keys}
    if config is not None:
        found = [fault for check in RULES for fault in check(config)]
        faults += [fault for fault in found if wrong.isdisjoint(fault.keys)]
    return (None if faults else config), faults


def expand(path: str) -> str:
    """``~`` and the project's cache folder resolved; a path that exists is made absolute."""
    ours = "~/.cache/rlhf_lightning"
    if path == ours or path.startswith(ours + "/"):
        return str(cache_dir()) + path[len(ours) :]
    if path.startswith("~"):
        return os.path.expanduser(path)
    return str(Path(path).absolute()) if path and path != "tiny" and Path(path).exists() else path


def _paths(values: dict[str, Any]) -> dict[str, Any]:
    """A resumed run must find its files from any folder, so that relative paths are made absolute here."""
    values = copy.deepcopy(values)
    for key in PATHS:
        section, name = key.split(".")
        inside = values.get(section)
        if isinstance(inside, dict) and isinstance(inside.get(name), str):
            inside[name] = expand(inside[name])
    return values


def _translate(errors: list[ErrorDetails], values: dict[str, Any]) -> list[Fault]:
    faults: dict[str, Fault] = {}
    for error in errors:
        keys, field, owner = _locate(error["loc"])
        key = ".".join(keys)
        kind = error["type"]
        if kind == "extra_forbidden":
            faults.setdefault(key, _unknown(key, owner))
        elif kind in ("union_tag_not_found", "union_tag_invalid"):
            kinds = ", ".join(kind_of(section) for section in owner)
            given = error["input"].get("kind") if isinstance(error["input"], dict) else None
            faults.setdefault(f"{key}.kind", _wrong(f"{key}.kind", f"one of {kinds}", given))
        elif kind == "missing":
            faults.setdefault(key, Fault((key,), f"{key} is required ({_explain(key)}): give {key}=VALUE"))
        elif kind == "value_error" and field is not None and not _numeric(field):
            faults.setdefault(key, _wrong(key, str(error["ctx"]["error"]), error["input"]))
        elif kind in ("model_type", "model_attributes_type", "dict_type"):
            faults.setdefault(
                key, _wrong(key, f"a section: name a key inside it, {key}.NAME=VALUE", error["input"])
            )
        else:
            words = rule(field) if field is not None else error["msg"]
            note = f" ({field.description})" if field is not None and not _said(field, words) else ""
            faults.setdefault(key, _wrong(key, words, _value(values, keys), note))
    return list(faults.values())


def _wrong(key: str, words: str, value: Any, note: str = "") -> Fault:
    return Fault((key,), f"{key} must be {words}, not {show(value)}{note}")


def _said(field: FieldInfo, words: str) -> bool:
    return field.description is not None and field.description in words


def _numeric(field: FieldInfo) -> bool:
    return "number" in rule(field)


def _unknown(key: str, owner: list[type[BaseModel]]) -> Fault:
    head = key.rpartition(".")[0]
    inside = [name for section in owner for name in section.model_fields]
    close = nearest_key(key, [f"{head}.{name}" for name in inside if head])
    if known(key) and "." in key:  # a setting of another kind of reward
        return Fault((key,), f"{key} is no setting here: {head} of this kind has {', '.join(inside)}")
    hint = f"did you mean {close}?" if close else "see python train.py --help"
    return Fault((key, close) if close else (key,), f"{key} is no setting; {hint}")


def _explain(key: str) -> str:
    found = [s.field.description for s in settings() if s.key == key]
    return str(found[0]) if found else "it has no default"


def _locate(loc: tuple[int | str, ...]) -> tuple[list[str], FieldInfo | None, list[type[BaseModel]]]:
    """Dotted key of an error, its field, and the sections that hold it; pydantic's own marks are left out."""
    keys: list[str] = []
    here: list[type[BaseModel]] = [Config]
    field: FieldInfo | None = None
    named = False  # inside a mapping from free names
    for part in loc:
        if named:
            keys.append(str(part))
            here, field, named = sections(get_args(field.annotation)[1]) if field else [], None, False
            continue
        if len(here) > 1:  # the tag of a choice by kind
            here, field = [s for s in here if kind_of(s) == part], None
            continue
        if not here or (
            here[0].model_fields.get(str(part)) is None
            and field is not None
            and not sections(field.annotation)
        ):
            break  # an index, or the member of a union of plain types
        keys.append(str(part))
        field = here[0].model_fields.get(str(part))
        if field is None:
            break
        named = get_origin(field.annotation) is dict
        below = sections(field.annotation)
        if not below and not named:
            break
        here = below or here
    return keys, field, here


def kind_of(section: type[BaseModel]) -> str:
    """The word that chooses this section among several."""
    return str(get_args(section.model_fields["kind"].annotation)[0])


def _value(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _without(errors: list[ErrorDetails], values: dict[str, Any]) -> Config | None:
    """The config with every faulty setting left at its default, where that can be had."""
    values = copy.deepcopy(values)
    for error in errors:
        keys, _, _ = _locate(error["loc"])
        _remove(values, ".".join(keys))
    try:
        return Config.model_validate(values)
    except ValidationError:
        return None


def _remove(node: Any, key: str) -> None:
    """Take a setting away, a list as a whole; reading it first could trip over the fault that it has."""
    *heads, last = key.partition("[")[0].split(".")
    for head in heads:
        node = node.get(head) if hasattr(node, "get") else None
    if node is not None and hasattr(node, "keys") and last in node.keys():  # noqa: SIM118, "in" of OmegaConf resolves
        del node[last]


def _missing(value: Any, key: str) -> Iterable[str]:
    """Dotted keys of the values that the files leave to the user, written ``???``."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _missing(below, f"{key}.{name}".lstrip("."))
    elif value == "???":
        yield key


def _secrets(value: Any, key: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _secrets(below, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for below in value:
            yield from _secrets(below, key)
    elif isinstance(value, str) and (found := SECRET.search(value)):
        yield key, found.group(1)


def _secret(key: str, name: str) -> Fault:
    return Fault(
        (key,),
        f"{key} must not take ${{oc.env:{name}}}: the run folder keeps every setting in plain text; "
        "leave secrets in the environment, where the libraries read them",
    )
