"""Runs of the tiny model that die where they are told to, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Runs:
    """Runs commands, and compares what they left."""

    def __init__(self, server: subprocess.Popen[str], place: Path) -> None:
        self.server, self.place = server, place
        self.straight: dict[str, Path] = {}

    def __call__(
        self,
        *argv: str,
        at: str | None = None,
        signals: Sequence[int] = (signal.SIGKILL,),
        log: Path | None = None,
        seconds: int = 0,
        file_size: int = 0,
    ) -> int:
        """The exit code; minus a signal's number where that ended it.

        Args:
            at, signals: see ``server``.
            log: where its output goes; None: to the log of all.
            seconds: after which SIGALRM ends it; 0: never.
            file_size: bytes beyond which no file grows, as on a full disk; 0: no limit.
        """
        request = {"argv": argv, "cwd": str(self.place), "log": str(log or self.place / "log.txt")}
        request |= {"point": at, "signals": list(signals), "seconds": seconds, "file_size": file_size}
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        status = int(self.server.stdout.readline())
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def unbroken(self, words: list[str]) -> Path:
        """The run of these words that nobody disturbs, once for all tests."""
        key = " ".join(words)
        if key not in self.straight:
            folder = self.place / f"straight{len(self.straight)}"
            assert self(*words, f"hydra.run.dir={folder}") == 0, self.log()
            self.straight[key] = folder
        return self.straight[key]

    def log(self) -> str:
        return (self.place / "log.txt").read_text()[-3000:]

    def kill_and_resume(self, words: list[str], kills: list[str], folder: Path) -> None:
        """Start, die, continue as often as there are kills, and once to the end."""
        first = [*words, f"hydra.run.dir={folder}"]
        for kill in kills:
            code = self(*(first if not folder.exists() else [f"resume={folder}"]), at=kill)
            assert code == -signal.SIGKILL, f"{kill} was never reached: {code}\n{self.log()}"
        assert self(f"resume={folder}") == 0, self.log()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.processes.server"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield Runs(server, tmp_path_factory.mktemp("runs"))
    assert server.stdin
    server.stdin.close()
    server.wait(timeout=60)


@pytest.fixture(scope="session")
def same() -> Callable[[Path, Path], None]:
    """``same(one, other)``: every byte of what a run computed."""

    def compare(one: Path, other: Path) -> None:
        names = ["metrics.csv", "samples.jsonl", "evaluation.jsonl", "before_after.json"]
        names = [name for name in names if (one / name).exists()]
        names += [str(path.relative_to(one)) for path in (one / "adapters").rglob("*") if path.is_file()]
        assert any(name.endswith(".safetensors") for name in names)
        for name in names:
            assert (other / name).read_bytes() == (one / name).read_bytes(), name
        mine, theirs = (json.loads((f / "summary.json").read_text()) for f in (one, other))
        assert theirs["status"] == "finished" and theirs["counters"] == mine["counters"]

    return compare
