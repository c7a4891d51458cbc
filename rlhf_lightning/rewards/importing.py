"""Finds ``package.module:name`` and says what is wrong where it cannot."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable

from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import shown_error, shown_value


def import_function(spec: str, *, key: str) -> Callable[..., object]:
    """The callable that ``package.module:name`` names; ``name`` may have dots.

    The current folder can be imported from.

    Raises:
        UserError: no such module or name (with the nearest), the import fails, or the thing cannot be
            called with ``prompts=`` and ``responses=``.
    """
    where = os.getcwd()
    if where not in sys.path and "" not in sys.path:
        sys.path.insert(0, where)  # as `python -m` does, and `python train.py` only for train.py's own folder
    module_name, _, attribute = spec.partition(":")
    found: object = _module(module_name, f"{key}={spec}")
    path = module_name
    for part in attribute.split("."):
        if not hasattr(found, part):
            nearest = _nearest(part, (name for name in dir(found) if not name.startswith("_")))
            raise UserError(f"{key}={spec}: {path} has no {part!r}{nearest}")
        found, path = getattr(found, part), f"{path}.{part}"
    if not callable(found):
        raise UserError(
            f"{key}={spec} must be a function, and is {shown_value(found)} ({type(found).__name__})"
        )
    if inspect.iscoroutinefunction(found):
        raise UserError(f"{key}={spec} must be a plain function, and is async")
    _check_signature(found, f"{key}={spec}")
    return found


def _module(name: str, shown_key: str) -> object:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{shown_key}: {name!r} is not the name of a module")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise UserError(f"{shown_key}: {name} imports {missing}, which is not installed") from error
        parent, _, last = missing.rpartition(".")
        package = sys.modules.get(parent)
        if parent and not hasattr(package, "__path__"):
            raise UserError(
                f"{shown_key}: {parent} is a module, not a package: write {parent}:{last}"
            ) from error
        inside = pkgutil.iter_modules(package.__path__ if package is not None else None)
        names = {module.name for module in inside} | (set() if parent else set(sys.stdlib_module_names))
        place = f"in {parent}" if parent else f"in {os.getcwd()} or on sys.path"
        raise UserError(f"{shown_key}: no module {last!r} {place}{_nearest(last, names)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a script run by being imported
        raise UserError(f"{shown_key}: importing {name} raised {shown_error(error)}") from error


def _check_signature(function: Callable[..., object], shown_key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none; the first call will tell
        return
    try:
        signature.bind(prompts=[], responses=[])
    except TypeError as error:
        raise UserError(
            f"{shown_key} is called with prompts=[...] and responses=[...], and its signature {signature} "
            f"does not fit: {error}"
        ) from error


def _nearest(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, sorted(names), n=1, cutoff=0.6)
    return f"; the nearest is {close[0]!r}" if close else ""
