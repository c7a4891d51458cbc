"""Python functions as rewards, from real modules: whatever goes wrong stops the run with the row shown."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_lightning.config.rewards import FunctionRewardConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.functions import FunctionReward

PROMPTS = ["p0", "p1", "p2"]
RESPONSES = ["fine", "bad", "fine too"]
CODE = """
import asyncio, threading, time, torch
LIMIT = 3
calls = []
threads = set()

def lengths(prompts, responses):
    return [float(len(r)) for r in responses]

def arguments(*, prompts, responses):
    calls.append((list(prompts), list(responses)))
    prompts.clear(); responses.append("mine")
    return [0.0, 0.0, 0.0]

def raises(prompts, responses):
    if "bad" in responses:
        raise ValueError("cannot judge\\x1b[31m this")
    return [0.0] * len(responses)

def raises_on_batches(prompts, responses):
    if len(responses) > 1:
        raise RuntimeError("one at a time")
    return [0.0]

def exits(prompts, responses):
    raise SystemExit(3)

def hangs(prompts, responses):
    if "bad" in responses:
        time.sleep(1000)
    return [0.0] * len(responses)

def slow(prompts, responses):
    time.sleep(0.2 * len(responses))
    return [0.0] * len(responses)

def drops(prompts, responses):
    return [1.0 for r in responses if r != "bad"]

def nan(prompts, responses):
    return [float("nan") if r == "bad" else 0.0 for r in responses]

def strings(prompts, responses):
    return ["0.5"] * len(responses)

def nothing(prompts, responses):
    pass

def texts_only(texts):
    return [0.0] * len(texts)

async def later(prompts, responses):
    return [0.0] * len(responses)

def grad_mode(prompts, responses):
    threads.add(threading.get_ident())
    return [float(torch.is_grad_enabled())] * len(responses)

class Judge:
    @staticmethod
    def score(prompts, responses):
        return [7.0] * len(responses)
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FunctionReward]:
    """Functions of ``myrewards.py``, which lies in the current folder and nowhere on the path."""
    (tmp_path / "myrewards.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "needy.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "boom.py").write_text("1 / 0\n")
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "style.py").write_text("def polite(prompts, responses):\n    return [2.0] * len(responses)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    before = set(sys.modules)

    def make(spec: str, timeout_s: float = 5.0) -> FunctionReward:
        return FunctionReward(FunctionRewardConfig(kind="function", function=spec, timeout_s=timeout_s))

    yield make
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {"myrewards", "mypackage", "broken", "needy", "boom"}:
            del sys.modules[name]


def failure(reward: FunctionReward) -> str:
    with pytest.raises(UserError) as caught:
        reward(PROMPTS, RESPONSES)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_function_in_the_current_folder_is_found(build: Callable[..., FunctionReward]) -> None:
    scored = build("myrewards:lengths")(PROMPTS, RESPONSES)
    assert scored.scores.tolist() == [4.0, 3.0, 8.0] and scored.scores.dtype == torch.float32
    assert scored.parts == {}
    assert build("mypackage.style:polite")(PROMPTS, RESPONSES).scores.tolist() == [2.0, 2.0, 2.0]
    assert build("myrewards:Judge.score")(PROMPTS, RESPONSES).scores.tolist() == [7.0, 7.0, 7.0]


def test_the_function_gets_lists_of_its_own(build: Callable[..., FunctionReward]) -> None:
    prompts, responses = list(PROMPTS), list(RESPONSES)
    build("myrewards:arguments")(prompts, responses)
    assert (prompts, responses) == (PROMPTS, RESPONSES)
    assert sys.modules["myrewards"].calls == [(PROMPTS, RESPONSES)]


def test_no_gradient_is_recorded_and_one_thread_serves_all_calls(
    build: Callable[..., FunctionReward],
) -> None:
    reward = build("myrewards:grad_mode")
    assert [reward(PROMPTS, RESPONSES).scores.sum().item() for _ in range(3)] == [0.0, 0.0, 0.0]
    assert len(sys.modules["myrewards"].threads) == 1
    assert threading.get_ident() not in sys.modules["myrewards"].threads


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("myreward:lengths", "no module 'myreward' in"),
        ("myreward:lengths", "; the nearest is 'myrewards'"),
        ("mypackage.stile:polite", "no module 'stile' in mypackage; the nearest is 'style'"),
        ("myrewards.lengths:x", "myrewards is a module, not a package: write myrewards:lengths"),
        ("myrewards:length", "myrewards has no 'length'; the nearest is 'lengths'"),
        ("myrewards:Judge.skore", "myrewards.Judge has no 'skore'; the nearest is 'score'"),
        ("myrewards:LIMIT", "must be a function, and is 3 (int)"),
        ("myrewards:later", "is async"),
        ("myrewards:texts_only", "signature (texts) does not fit"),
        ("needy:f", "needy imports not_installed_anywhere, which is not installed"),
        ("broken:f", "importing broken raised SyntaxError"),
        ("boom:f", "importing boom raised ZeroDivisionError: division by zero"),
        ("boom:f", "boom.py:1)"),
        ("..a:f", "is not the name of a module"),
    ],
)
def test_what_cannot_be_imported_is_explained(
    build: Callable[..., FunctionReward], spec: str, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(spec)
    assert said in str(caught.value) and f"reward.function={spec}" in str(caught.value)


def test_an_exception_keeps_its_type_message_and_place_and_the_row_is_found(
    build: Callable[..., FunctionReward],
) -> None:
    with pytest.raises(UserError) as caught:
        build("myrewards:raises")(PROMPTS, RESPONSES)
    message = str(caught.value)
    assert "reward.function=myrewards:raises raised ValueError: cannot judge\\x1b[31m this (" in message
    assert "myrewards.py:" in message
    assert "alone, this one does the same: row 1 (prompt 'p1', response 'bad')" in message
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_fault_of_the_batch_as_a_whole_is_said_to_be_one(build: Callable[..., FunctionReward]) -> None:
    assert "no row alone does the same (3 tried, row 0" in failure(build("myrewards:raises_on_batches"))


def test_a_function_that_exits_does_not_end_the_run_silently(build: Callable[..., FunctionReward]) -> None:
    assert "raised SystemExit: 3" in failure(build("myrewards:exits"))


def test_a_hang_stops_the_run_within_twice_the_limit(build: Callable[..., FunctionReward]) -> None:
    start = time.monotonic()
    message = failure(build("myrewards:hangs", timeout_s=0.2))
    assert time.monotonic() - start < 5.0
    assert "had not returned after 0.2 s (reward.timeout_s) for 3 responses" in message
    assert "alone, this one did not return either: row 1 (prompt 'p1', response 'bad')" in message


def test_slow_is_told_from_stuck(build: Callable[..., FunctionReward]) -> None:
    message = failure(build("myrewards:slow", timeout_s=0.5))
    assert re.search("row by row, [12] of 3 were done after 0.5 s more$", message)


def test_after_a_hang_the_reward_still_answers(build: Callable[..., FunctionReward]) -> None:
    reward = build("myrewards:hangs", timeout_s=0.2)
    failure(reward)
    assert reward(["p"], ["good"]).scores.tolist() == [0.0]


def test_the_thread_that_hangs_is_one_that_no_exit_waits_for(build: Callable[..., FunctionReward]) -> None:
    reward = build("myrewards:hangs", timeout_s=0.1)
    failure(reward)
    stuck = [thread for thread in threading.enumerate() if thread.name == reward.name]
    assert stuck and all(thread.daemon for thread in stuck)


@pytest.mark.slow
def test_a_stuck_function_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    """The run saves, closes and leaves: nothing joins the thread that hangs."""
    (tmp_path / "stuck.py").write_text("import time\ndef f(prompts, responses):\n    time.sleep(1000)\n")
    script = textwrap.dedent(
        """
        from rlhf_lightning.config.rewards import FunctionRewardConfig
        from rlhf_lightning.errors import UserError
        from rlhf_lightning.rewards.functions import FunctionReward
        reward = FunctionReward(FunctionRewardConfig(kind="function", function="stuck:f", timeout_s=0.1))
        try:
            reward(["p"], ["r"])
        except UserError:
            print("closed")
        """
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env={"PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "closed"), done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("drops", "returned 2 scores for 3 responses"),
        ("drops", "alone, this one does the same: row 1 (prompt 'p1', response 'bad')"),
        ("nan", "row 1 (prompt 'p1', response 'bad') must be finite, got nan"),
        ("strings", "row 0 (prompt 'p0', response 'fine') must be a number, got '0.5' of type str"),
        ("nothing", "must return a list of numbers, got None of type NoneType"),
    ],
)
def test_bad_answers_stop_with_the_row(build: Callable[..., FunctionReward], name: str, said: str) -> None:
    message = failure(build(f"myrewards:{name}"))
    assert said in message and f"reward.function=myrewards:{name}" in message


def test_no_answers_at_all(build: Callable[..., FunctionReward]) -> None:
    assert build("myrewards:lengths")([], []).scores.shape == (0,)


def test_ctrl_c_is_not_taken_for_the_functions_fault(
    build: Callable[..., FunctionReward],
) -> None:
    reward = build("myrewards:hangs", timeout_s=20.0)
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    # A suite that a shell started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            reward(PROMPTS, RESPONSES)
    finally:
        signal.signal(signal.SIGINT, before)
