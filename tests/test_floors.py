"""The house: each floor imports only from floors below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rlhf_lightning"

FLOOR = {
    "errors": 0, "allocator": 0, "units": 0, "randomness": 0, "types": 0, "functional": 0,
    "advantages": 0, "assets": 0, "kernels": 0, "config": 1, "planning": 1, "data": 1, "report": 1,
    "models": 2,
    "rewards": 3,
    "rollout": 4,
    "stages": 5, "callbacks": 5, "console": 5, "tracking": 5,
    "build": 6, "loading": 6, "evaluation": 6,
    "run": 7, "doctor": 7, "serving": 7, "serve_reward": 7,
    "exporting": 7, "export": 7, "chat": 7, "chatting": 7,
    "pipeline": 8,
}  # fmt: skip
PURE = {
    "__future__", "collections", "typing", "math", "dataclasses", "functools", "torch", "rlhf_lightning",
}  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Rooms of this package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("rlhf_lightning.")}
    return found & set(FLOOR)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    # the command line hands over to the run once the config is judged, and to nothing else above it
    allowed = {"run", "pipeline"} if path.name == "cli.py" else set()
    above = {other for other in imported(path) - allowed if FLOOR[other] > FLOOR[here]}
    assert not above, f"{here} (floor {FLOOR[here]}) imports from above: {sorted(above)}"


def test_the_pure_floor_needs_torch_alone() -> None:
    for name in ("functional", "advantages", "kernels"):
        for path in (PACKAGE / name).glob("*.py"):
            tops = {
                (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            assert tops <= PURE, path
