"""The words of the command line, judged before Hydra sees them; Hydra's complaints in one sentence."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from rlhf_lightning.config.describe import known, nearest, nearest_key
from rlhf_lightning.config.rules import Fault

ALONE = "(alone)"  # stands for the key of words without a value


@dataclass(frozen=True)
class Words:
    """The overrides of a command, read: faults found, and the forms that Hydra is given."""

    tokens: list[str]  # as typed, without a needless + before a group
    forced: list[str]  # each key=value as ++key=value, so that the schema, not Hydra, judges unknown keys
    sweeps: list[str]  # the tokens that give several values
    unknown: list[str]  # keys that are in no section
    faults: list[Fault]


def read(tokens: list[str], offered: dict[str, list[str]], *, resuming: bool = False) -> Words:
    """Judge each word by itself: syntax, group choices, deletions."""
    words = Words([], [], [], [], [])
    for token in tokens:
        parsed = None if token.startswith("=") else _parse(token)
        if parsed is None:
            if not (
                "=" not in token and words.faults and words.faults[-1].keys == (ALONE,)
            ):  # "ppo.clip 0.2" is one
                words.faults.append(Fault((token if "=" in token else ALONE,), _syntax(token, offered)))
            continue
        key = parsed.key_or_group
        if parsed.is_sweep_override():
            words.sweeps.append(token)
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            pass
        elif key in offered:
            token = token.lstrip("+")
            words.faults.extend(_choice(parsed, token, offered, resuming))
        elif not known(key):
            if parsed.is_delete():
                close = nearest_key(key)
                hint = f"; did you mean ~{close}?" if close else ""
                words.faults.append(Fault((key,), f"~{key} takes away a setting that is not there{hint}"))
            else:
                words.unknown.append(key)
        if parsed.is_sweep_override() and key in offered:
            token = token.lstrip("+")
            for value in parsed.sweep_string_iterator() if parsed.is_discrete_sweep() else []:
                words.faults.extend(_option(key, str(value), offered))
        elif parsed.is_sweep_override() and not known(key) and not key.startswith("hydra."):
            words.unknown.append(key)
        words.tokens.append(token)
        plain_key = key not in offered and not key.startswith("hydra") and not parsed.is_delete()
        words.forced.append("++" + token.lstrip("+") if plain_key else token)
    return words


_HOME = re.compile(r"(?<![^,\[])~/[^,\]]*")  # a whole value, or one of a list or sweep


def with_home(token: str) -> str:
    """A word whose value, or one of whose values, begins with ``~/``, in a form that Hydra's grammar takes.

    The sign itself stays, for whoever opens the path expands it; Hydra's own folders are expanded here.
    """
    key, equals, value = token.partition("=")
    if not equals or "~/" not in value or any(sign in value for sign in "'\"{}()"):
        return token
    own = key.lstrip("+").startswith("hydra.")
    return f"{key}=" + _HOME.sub(lambda m: quoted(os.path.expanduser(m.group()) if own else m.group()), value)


def _parse(token: str) -> Override | None:
    try:
        return OverridesParser.create().parse_overrides([token])[0]
    except HydraException:
        return None


def _syntax(token: str, offered: dict[str, list[str]]) -> str:
    name = token.lstrip("+-")
    if "=" not in token:
        if name in offered:
            return f"{token} needs a choice: {name}={'|'.join(offered[name])}"
        group = next((g for g, names in offered.items() if name in names), None)
        if group:
            return f"{token} stands alone; did you mean {group}={name}?"
        return f"{token} stands alone: settings are given as KEY=VALUE, without spaces around ="
    if token.startswith("-"):
        return f"{token} is no option: settings are given without dashes, {name}"
    if token.startswith("="):
        return f"{token} has no key: settings are given as KEY=VALUE, without spaces around ="
    key, _, value = token.partition("=")
    return (
        f"{key}={value} cannot be read: write lists as [a,b], sections as {{a:1}}, and put a text with "
        f"special signs in quotes inside quotes, {key}=\"'...'\""
    )


def _choice(parsed: Override, token: str, offered: dict[str, list[str]], resuming: bool) -> list[Fault]:
    key, value = parsed.key_or_group, parsed.value()
    if parsed.is_delete() or value is None:
        return []
    if resuming:
        text = f"{token} cannot change on resume: the run keeps its choices; give single keys, as ppo.lr=1e-5"
        return [Fault((key,), text)]
    if isinstance(value, dict):
        return [Fault((key,), f"{key}={{...}} is no choice: name single keys, such as {key}.NAME=VALUE")]
    if isinstance(value, list):
        return [fault for one in value for fault in _option(key, str(one), offered)]
    return _option(key, value.text if isinstance(value, QuotedString) else str(value), offered)


def _option(key: str, value: str, offered: dict[str, list[str]]) -> list[Fault]:
    value = value.removesuffix(".yaml").strip("'\"")
    if value in (*offered[key], "null"):
        return []
    close = nearest(value, offered[key])
    hint = f"did you mean {key}={close}? " if close else ""
    given = f"{key}={value}" if value else f"{key}= (nothing after =)"
    return [Fault((key,), f"{given} is not offered; {hint}There are {', '.join(offered[key])}")]


def in_one_sentence(error: BaseException) -> str:
    """What Hydra or OmegaConf complains of, without search paths and links."""
    texts = [str(error), str(error.__cause__) if error.__cause__ is not None else ""]
    lines: list[str] = []
    for line in "\n".join(texts).splitlines():
        line = line.strip()
        if line.startswith(("Config search path", "Search path")):
            break
        if line and not line.startswith(
            ("See http", "full_key", "object_type", "reference_type", "To append")
        ):
            lines.append(line)
    return " ".join(lines) or type(error).__name__


def quoted(value: Any) -> str:
    """A value as Hydra's grammar takes it literally, whatever signs it holds."""
    return QuotedString(text=str(value), quote=Quote.single).with_quotes()
