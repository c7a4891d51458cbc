"""The reward server as other machines meet it: real processes, real requests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from rlhf_lightning.config.rewards import HTTPRewardConfig, LearnedRewardConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import ppo_cast
from rlhf_lightning.rewards.http import TOKEN, HTTPReward
from rlhf_lightning.rewards.learned import LearnedReward
from rlhf_lightning.serving.find import TINY

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["The soup was", "Our waiter", "The soup was", "", "Nothing on the menu"]
RESPONSES = [" warm and the bread was fresh.", " never came back.", " cold.", " fine", ""]


@contextlib.contextmanager
def served(*words: str, token: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server process on a free port: the process, its address, and what it said at the start."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.pop(TOKEN, None)
    if token is not None:
        environment[TOKEN] = token
    command = [sys.executable, "-m", "rlhf_lightning.serve_reward", *words, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        said = ""
        while "use it:" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        found = re.search(r"reward\.url=(\S+)", said)
        assert found is not None
        url = found.group(1)
        _wait(url.removesuffix("/score"))
        yield process, url, said
    finally:
        process.kill()
        process.wait()


def _wait(address: str) -> None:
    for _ in range(200):
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{address}/health", timeout=5)
            return
        time.sleep(0.05)
    raise AssertionError("the server does not answer")


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    with served("tiny", token="s3cret") as server:
        yield server


@pytest.fixture
def ask(tiny):
    """``ask(body)``: status and answer of a request with the token."""

    def post(body: object, token: str | None = "s3cret") -> tuple[int, object]:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = httpx.post(tiny[1], headers=headers, timeout=30, **given)
        return answer.status_code, answer.json()

    return post


def test_scores_are_those_of_the_local_reward_model(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local one sits among the roles of PPO, as in training."""
    backbone = load_backbone(TINY)
    actor_critic = ActorCritic(backbone, TINY, cast=ppo_cast(TINY, reward_path="tiny"), temperature=0.7)
    local = LearnedReward(
        actor_critic.score,
        backbone.tokenizer,
        LearnedRewardConfig(kind="learned", path="tiny", batch_size=2),
        context=backbone.context_length,
    )
    monkeypatch.setenv(TOKEN, "s3cret")
    remote = HTTPReward(HTTPRewardConfig(kind="http", url=tiny[1], batch_size=3))
    here, there = local(PROMPTS, RESPONSES).scores, remote(PROMPTS, RESPONSES).scores
    torch.testing.assert_close(there, here, atol=1e-6, rtol=1e-6)
    assert len(set(there.tolist())) == len(PROMPTS)  # they tell answers apart


def test_it_says_what_it_serves_and_how_to_use_it(tiny) -> None:
    _, url, said = tiny
    assert "the embedded reward adapter" in said and "on tiny (nf4, float32, cpu)" in said
    assert f"use it: python train.py reward=http reward.url={url}" in said
    assert "as in RLHF_REWARD_TOKEN" in said and "s3cret" not in said
    health = httpx.get(url.replace("/score", "/health"))
    assert health.status_code == 200 and health.json() == {"status": "ok", "model": "tiny"}


def test_the_token_is_asked_for(ask, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {"prompts": ["a"], "responses": ["b"]}
    assert ask(pair)[0] == 200
    assert ask(pair, token=None) == (
        401,
        {"detail": "the token is missing: send Authorization: Bearer TOKEN"},
    )
    assert ask(pair, token="s3cre")[0] == 401
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(UserError, match=r"401 Unauthorized .* 'the token is missing.* which is not set"):
        HTTPReward(HTTPRewardConfig(kind="http", url=tiny[1]))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "the body must be JSON"),
        (b"[" * 100_000, "the body must be JSON"),
        ([1], 'the body must be {"prompts": [...], "responses": [...]}'),
        ({"prompts": ["a"]}, 'the body must be {"prompts": [...], "responses": [...]}'),
        ({"prompts": "a", "responses": ["a"]}, "prompts must be a list of texts, not 'a'"),
        ({"prompts": ["a"], "responses": [None]}, "responses[0] must be a text, not None"),
        ({"prompts": ["a", "b"], "responses": ["a"]}, "prompts and responses must be as many, not 2 and 1"),
        (
            {"prompts": ["a"] * 1025, "responses": ["a"] * 1025},
            "at most 1024 rows in a request, not 1025",
        ),
        (
            b'{"prompts": ["\\ud83c"], "responses": ["a"]}',
            "prompts[0] must be a text, but holds half a surrogate pair",
        ),
    ],
    ids=range(9),
)
def test_wrong_requests_get_one_sentence(ask, body: object, sentence: str) -> None:
    assert ask(body) == (422, {"detail": sentence})


def test_no_rows_no_scores(ask) -> None:
    assert ask({"prompts": [], "responses": []}) == (200, {"scores": []})


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "rlhf_lightning.serve_reward", "tiny", "--port", port]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stdout == ""
    assert re.fullmatch(
        rf"--host 127\.0\.0\.1 --port {port} cannot be served \(.*\): take another\n", ended.stderr
    )


@pytest.mark.slow
def test_a_run_against_the_server_and_a_clean_end(tmp_path: Path) -> None:
    with served("tiny") as (process, url, _):
        run = tmp_path / "run"
        words = ["debug=default", "logger=none", "reward=http", f"reward.url={url}", f"hydra.run.dir={run}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "train.py"), *words]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        lines = (run / "metrics.csv").read_text().splitlines()
        assert len(lines) == 3  # a header and two iterations
        assert "kind: http" in (run / "config_resolved.yaml").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "stopped"
