"""The schema in words: every key with its rule, for messages and for the help page."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_lightning.config.schema import Config

ANY = "*"  # stands in a dotted key for a name that the user chooses, as in reward.parts.*.weight

# Names that other libraries use for the same thing; the nearest spelling would not find them.
FOREIGN = {
    "accumulate_grad_batches": "ppo.micro_batch_size",
    "batch_size": "ppo.minibatch_size",
    "cliprange": "ppo.clip",
    "cliprange_value": "ppo.clip_value",
    "epsilon": "ppo.clip",
    "gradient_clip_val": "ppo.max_grad_norm",
    "init_kl_coef": "ppo.beta",
    "kl_coef": "ppo.beta",
    "kl_penalty": "ppo.kl_estimator",
    "lambda": "ppo.lam",
    "learning_rate": "ppo.lr",
    "load_in_4bit": "model.quantization",
    "max_epochs": "ppo.iterations",
    "max_length": "generation.max_new_tokens",
    "max_steps": "ppo.iterations",
    "mini_batch_size": "ppo.minibatch_size",
    "ppo_epochs": "ppo.epochs",
    "precision": "model.dtype",
    "total_episodes": "ppo.iterations",
}


@dataclass(frozen=True)
class Setting:
    """One leaf of the schema."""

    key: str
    field: FieldInfo
    section: type[BaseModel]


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold: none for a plain value, several for a choice by ``kind``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return [section for part in get_args(annotation) for section in sections(part)]
    return []


def _named_sections(annotation: Any) -> list[type[BaseModel]]:
    """As ``sections``, for a mapping from free names."""
    return sections(get_args(annotation)[1]) if get_origin(annotation) is dict else []


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        inner, named = sections(field.annotation), _named_sections(field.annotation)
        if not inner and not named:
            yield Setting(key, field, section)
        for below in inner:
            yield from _walk(below, f"{key}.")
        for below in named:
            yield from _walk(below, f"{key}.{ANY}.")


@cache
def settings() -> tuple[Setting, ...]:
    """Every leaf of the schema; a key that several kinds share comes once for each."""
    return tuple(_walk(Config, ""))


def known(key: str) -> bool:
    """Whether a dotted key, or a section of it, is in the schema for some choice of kinds."""
    asked = key.split(".")
    for setting in settings():
        have = setting.key.split(".")[: len(asked)]
        if len(have) == len(asked) and all(h in (ANY, a) for h, a in zip(have, asked, strict=True)):
            return True
    return False


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The most alike of ``words``, or None where nothing is alike."""
    words = list(words)
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    begun = [longer for longer in words if len(word) > 2 and longer.startswith(word)]
    return next(iter(found + begun), None)


def nearest_key(key: str, extra: Sequence[str] = ()) -> str | None:
    """The valid dotted key that the user most likely meant; ``extra`` adds keys of this config alone."""
    keys = list(
        dict.fromkeys([*(s.key for s in settings() if ANY not in s.key), *Config.model_fields, *extra])
    )
    leaf = key.rsplit(".", 1)[-1]
    if leaf in FOREIGN:
        return FOREIGN[leaf]
    exact = [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
    if exact:
        return nearest(key, exact) or exact[0]
    if "." in key:
        head = key.rsplit(".", 1)[0]
        inside = nearest(leaf, [k.rsplit(".", 1)[-1] for k in keys if k.rpartition(".")[0] == head])
        return f"{head}.{inside}" if inside else nearest(key, keys)
    whole = nearest(key, keys)
    if whole:
        return whole
    leaves = {k.rsplit(".", 1)[-1]: k for k in keys}
    found = nearest(key, leaves)
    return leaves[found] if found else None


def rule(field: FieldInfo) -> str:
    """What a field accepts, as the end of "must be ..."."""
    annotation = field.annotation
    parts = (
        [a for a in get_args(annotation) if a is not type(None)] if _optional(annotation) else [annotation]
    )
    words = " or ".join(_kind(part, field) for part in parts)
    return f"{words} or null" if _optional(annotation) else words


def _optional(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def _kind(annotation: Any, field: FieldInfo) -> str:
    if get_origin(annotation) is Union or isinstance(annotation, types.UnionType):
        return " or ".join(_kind(part, field) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return ", ".join(choices[:-1]) + f" or {choices[-1]}" if len(choices) > 1 else str(choices[0])
    if get_origin(annotation) is list:
        return "a list of texts, [a,b]"
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        return f"a {'whole ' if annotation is int else ''}number{_range(field)}"
    if annotation is str:
        pattern = any(getattr(m, "pattern", None) for m in field.metadata)
        return f"of the form {field.description}" if pattern else "a text"
    return "a section: name a key inside it"


def _range(field: FieldInfo) -> str:
    bounds = []
    for limit in field.metadata:
        match limit:
            case annotated_types.Ge(ge=n):
                bounds.append(f"at least {n}")
            case annotated_types.Gt(gt=n):
                bounds.append(f"above {n}")
            case annotated_types.Le(le=n):
                bounds.append(f"at most {n}")
            case annotated_types.Lt(lt=n):
                bounds.append(f"below {n}")
    return " " + " and ".join(bounds) if bounds else ""


def show(value: Any) -> str:
    """A value as the user would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value}'" if value else "empty"
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, dict):
        return "a section"
    return str(value)
