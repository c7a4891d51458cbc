"""Runs train.py again and again, each time in a fork of a process that has imported everything.

One request a line on stdin, as JSON: ``argv``, ``cwd``, ``log``, and ``point``: where the run sends itself
``signals``, as ``module:dotted.name@n`` before the n-th call, ``...@n+`` after it; or null. One wait status a
line back.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_MEMORY = 12 << 30  # bytes of address space: a wild size must not take the machine along
ROOT = Path(__file__).resolve().parents[2]


def arm(point: str, signals: list[int]) -> None:
    """Let the n-th call of something send signals to this process."""
    where, _, count = point.rpartition("@")
    after = count.endswith("+")
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def counted(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == int(count.rstrip("+"))
        if now and not after:
            send(signals)
        result = original(*args, **keywords)
        if now and after:
            send(signals)
        return result

    # A method that needs no instance is found on its class as a plain function: it has to stay one.
    plain = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(counted) if plain else counted)


def send(signals: list[int]) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


def run(request: dict[str, Any]) -> int:
    """The whole command line, in this process."""
    from rlhf_lightning.config.cli import main

    os.chdir(request["cwd"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.alarm(request["seconds"])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if request["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
    if request["point"]:
        arm(request["point"], request["signals"])
    return main(ROOT, request["argv"])


def serve() -> None:
    import rlhf_lightning.run  # noqa: F401  # what takes seconds, once

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = run(json.loads(line))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        answers.write(f"{os.waitpid(child, 0)[1]}\n")


if __name__ == "__main__":
    serve()
