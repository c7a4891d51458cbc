"""A server as the reward: a real one on a free port, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
import torch
import uvicorn

from rlhf_lightning.config import rewards as kinds
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.build import build_reward
from rlhf_lightning.rewards.http import TOKEN, HTTPReward, _seconds

Answer = tuple[int, dict[str, str], bytes]


def scored(request: dict[str, list[str]]) -> Answer:
    """Letters of each answer."""
    return 200, {}, json.dumps({"scores": [float(len(text)) for text in request["responses"]]}).encode()


@dataclass
class Faulty:
    """An ASGI application that does what ``script`` says, an entry a request, then scores."""

    script: list[Callable[[dict[str, list[str]]], Answer] | Answer | float | None] = field(
        default_factory=list
    )
    """A function of the request, an answer, seconds to wait before scoring, None: cut the line."""
    always: Answer | None = None
    requests: list[dict[str, list[str]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def __call__(self, scope: dict, receive: Callable, send: Callable[[dict], Awaitable[None]]) -> None:
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        request = json.loads(body)
        self.requests.append(request)
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        step = self.script.pop(0) if self.script else self.always or scored
        if step is None:  # more bytes promised than come: uvicorn closes the connection
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"99")]}
            )
            await send({"type": "http.response.body", "body": b"{"})
            return
        if isinstance(step, float):
            await asyncio.sleep(step)
            step = scored
        status, headers, data = step if isinstance(step, tuple) else step(request)
        pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": data})


@pytest.fixture(scope="module")
def _server() -> Iterator[Faulty]:
    app = Faulty()
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    app.url = f"http://127.0.0.1:{bound.getsockname()[1]}/score"
    yield app
    server.should_exit = True
    thread.join(5)


@pytest.fixture
def server(_server: Faulty) -> Faulty:
    _server.script, _server.always = [], None
    _server.requests.clear()
    _server.headers.clear()
    return _server


def client(url: str, **settings) -> HTTPReward:
    given = {"timeout_s": 5.0, "retries": 3, "backoff_s": 0.01} | settings
    return HTTPReward(kinds.HTTPRewardConfig(kind="http", url=url, **given))


@pytest.fixture
def reward(server: Faulty) -> HTTPReward:
    made = client(server.url)
    server.requests.clear()
    return made


def fails(reward: HTTPReward, prompts=("p", "q"), responses=("a", "bb")) -> str:
    with pytest.raises(UserError) as caught:
        reward(list(prompts), list(responses))
    text = str(caught.value)
    assert reward.name in text and "\n" not in text
    return text


# ---- what works -----------------------------------------------------------------------------------


def test_batches_keep_the_order(server: Faulty) -> None:
    reward = client(server.url, batch_size=2)
    server.requests.clear()
    answers = ["a", "bb", "", "dddd", "eeeee"]
    result = reward([f"p{i}" for i in range(5)], answers)
    assert result.scores.tolist() == [1.0, 2.0, 0.0, 4.0, 5.0]
    assert result.scores.dtype == torch.float32 and result.parts == {}
    assert [request["responses"] for request in server.requests] == [["a", "bb"], ["", "dddd"], ["eeeee"]]
    assert [request["prompts"] for request in server.requests] == [["p0", "p1"], ["p2", "p3"], ["p4"]]


def test_one_pair_is_scored_when_built_and_nothing_for_no_rows(server: Faulty) -> None:
    reward = client(server.url)
    assert [len(request["responses"]) for request in server.requests] == [1]
    assert reward([], []).scores.shape == (0,)
    assert len(server.requests) == 1


def test_any_text_arrives_as_it_is(server: Faulty, reward: HTTPReward) -> None:
    texts = ['"quoted"\n', "\x00\x1b[31m", "naïve 喜 🍜", "half \ud83c"]
    reward(texts, texts)
    assert server.requests[-1] == {"prompts": texts, "responses": texts}


def test_as_a_part_of_a_combined_reward(server: Faulty) -> None:
    http = kinds.HTTPRewardConfig(kind="http", url=server.url)
    brief = kinds.LengthRewardConfig(kind="length", target=1)
    parts = {
        "far": kinds.RewardPart(weight=2.0, reward=http),
        "near": kinds.RewardPart(weight=1.0, reward=brief),
    }
    scores = build_reward(kinds.CombinedRewardConfig(kind="combined", parts=parts))(["p"], ["abc"])
    assert scores.scores.tolist() == [6.0] and scores.parts["far"].tolist() == [3.0]


# ---- failures that pass ---------------------------------------------------------------------------

BUSY = (500, {}, b"busy")


def test_a_time_out_is_tried_again(server: Faulty) -> None:
    reward = client(server.url, timeout_s=0.2)
    server.requests.clear()
    server.script = [0.6]
    assert reward(["p"], ["abc"]).scores.tolist() == [3.0]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "script", [[BUSY, BUSY], [(503, {}, b"")], [None], [(429, {}, b""), None, BUSY]], ids=str
)
def test_what_may_pass_is_tried_again(server: Faulty, reward: HTTPReward, script: list) -> None:
    server.script = list(script)
    assert reward(["p"], ["abc"]).scores.tolist() == [3.0]
    assert len(server.requests) == len(script) + 1
    assert all(request == server.requests[0] for request in server.requests)


def test_retry_after_lengthens_the_pause(server: Faulty, reward: HTTPReward) -> None:
    server.script = [(429, {"retry-after": "0.3"}, b"")]
    start = time.monotonic()
    reward(["p"], ["abc"])
    assert 0.3 <= time.monotonic() - start < 2.0


def test_a_retry_after_beyond_all_patience_stops(server: Faulty, reward: HTTPReward) -> None:
    server.script = [(429, {"retry-after": "86400"}, b"")]
    text = fails(reward)
    assert "429 Too Many Requests, and asks to wait 86400 s" in text and len(server.requests) == 1


def test_pauses_double_and_end_at_a_minute(reward: HTTPReward) -> None:
    from rlhf_lightning.rewards.http import _MayPass

    pauses = [reward._pause(_MayPass(""), number) for number in (1, 2, 3, 14, 5000)]
    assert pauses == [0.01, 0.02, 0.04, 60.0, 60.0]


def test_a_long_wait_is_told(
    server: Faulty, reward: HTTPReward, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.script = [BUSY]
    with caplog.at_level(logging.WARNING):
        reward(["p"], ["abc"])
    assert not caplog.records  # a short one is not
    monkeypatch.setattr("rlhf_lightning.rewards.http.QUIET_S", 0.005)
    server.script = [BUSY]
    with caplog.at_level(logging.WARNING):
        reward(["p"], ["abc"])
    (record,) = caplog.records
    assert f"{reward.name}: the server answered 500 Internal Server Error" in record.getMessage()
    assert record.getMessage().endswith("try 2 of 4 in 0.01 s")


def test_retry_after_as_number_and_date() -> None:
    assert _seconds("7") == 7.0 and _seconds("-3") == 0.0
    assert _seconds(None) is None and _seconds("soon") is None and _seconds("nan") is None
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 98.0 <= _seconds(date) <= 100.0
    assert _seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


# ---- failures that stay ---------------------------------------------------------------------------


def test_always_500(server: Faulty, reward: HTTPReward) -> None:
    server.always = (500, {}, b'{"detail": "out of \\u001b[31mmemory"}')
    text = fails(reward)
    assert "answered 500 Internal Server Error and said 'out of \\x1b[31mmemory'" in text
    assert text.endswith("given up after 4 tries (reward.retries=3)") and len(server.requests) == 4


def test_never_in_time(server: Faulty) -> None:
    server.script = [0.3, 0.3]
    with pytest.raises(UserError, match=r"no answer within 0\.1 s \(reward\.timeout_s\); given up after 2"):
        client(server.url, timeout_s=0.1, retries=1)


def test_nobody_there_is_found_when_built() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/score"
        with pytest.raises(UserError, match=r"no connection \(.*refused\); is the server up\?; given"):
            client(url, retries=0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"scores": [1.0]}', "returned 1 scores for 2 responses; nothing for row 1 (prompt 'q'"),
        (b'{"scores": [1, 2, 3]}', "returned 3 scores for 2 responses"),
        (b'{"scores": [1.0, NaN]}', "row 1 (prompt 'q', response 'bb') must be finite, got nan"),
        (b'{"scores": [1.0, 1e999]}', "must be finite, got inf"),
        (b'{"scores": [1.0, null]}', "must be a number, got None"),
        (b'{"scores": [1.0, "2"]}', "must be a number, got '2' of type str"),
        (b'{"scores": [[1.0], [2.0]]}', "must be a number, got [1.0] of type list"),
        (b'{"scores": "12"}', "must return a list of numbers"),
        (b'{"rewards": [1, 2]}', 'the answer must be {"scores": [...]}, and the server said'),
        (b"[1, 2]", 'the answer must be {"scores": [...]}'),
        (b"<html>Welcome\x1b]0;x\x07</html>", "must be JSON, and the server said '<html>Welcome\\x1b"),
        (b"\xff\xfe", "the answer must be JSON"),
        (b"[" * 100_000, "the answer must be JSON"),
        (b"", "the answer must be JSON, and the server said ''"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_read_is_not_asked_for_again(
    server: Faulty, reward: HTTPReward, body: bytes, words: str
) -> None:
    server.always = (200, {}, body)
    text = fails(reward)
    assert words in text and "\x1b" not in text and len(text) < 700
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (400, {}, "400 Bad Request and said 'no'"),
        (401, {}, "said 'no'; the token is taken from RLHF_REWARD_TOKEN, which is not set"),
        (404, {}, "said 'no'; reward.url has to name the path that takes POST, often /score"),
        (413, {}, "a smaller reward.batch_size (now 64)"),
        (422, {}, "422 Unprocessable"),
        (307, {"location": "/other"}, "which points to '/other': name that address itself in reward.url"),
        (204, {}, "204 No Content"),
    ],
)  # fmt: skip
def test_other_statuses_stop_at_once(
    server: Faulty, reward: HTTPReward, status: int, headers: dict[str, str], words: str
) -> None:
    server.always = (status, headers, b"" if status == 204 else b'{"detail": "no"}')
    assert words in fails(reward)
    assert len(server.requests) == 1


def test_an_answer_that_trickles_in_ends(server: Faulty) -> None:
    """The client's own limit restarts with each piece."""

    async def trickle(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(40):
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.05)

    bound = socket.create_server(("127.0.0.1", 0))
    app = uvicorn.Server(
        uvicorn.Config(trickle, log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
    )
    thread = threading.Thread(target=app.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    start = time.monotonic()
    with pytest.raises(UserError, match=r"no answer within 0\.2 s"):
        client(f"http://127.0.0.1:{bound.getsockname()[1]}/score", timeout_s=0.2, retries=0)
    assert time.monotonic() - start < 1.5
    app.should_exit = True
    thread.join(5)


# ---- secrets and addresses ------------------------------------------------------------------------


def test_the_token_comes_from_the_environment(server: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    client(server.url)
    assert "authorization" not in server.headers[-1]
    monkeypatch.setenv(TOKEN, "s3cret\n")
    reward = client(server.url)
    assert server.headers[-1]["authorization"] == "Bearer s3cret"
    server.always = (401, {}, b"")
    text = fails(reward)
    assert text.endswith("RLHF_REWARD_TOKEN, which is set") and "s3cret" not in text


@pytest.mark.parametrize("token", ["two words", "schlüssel", "a\nb"])
def test_a_token_that_no_header_takes(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(UserError, match=r"RLHF_REWARD_TOKEN must be printable ASCII") as caught:
        client("http://127.0.0.1:9/score")
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://me:s3cret@host/score", "must not hold user:password"),
        ("http://s3cret@host/score", "must not hold user:password"),
        ("http://host:99999/score", "is no address (Port out of range 0-65535)"),
        ("http://[::1/score", "is no address"),
        ("http:///score", "names no host"),
    ],
)
def test_addresses_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        client(url)
    assert words in str(caught.value) and "s3cret" not in str(caught.value)


def test_no_proxy_for_this_machine(server: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    client(server.url, retries=0)
    client(server.url.replace("127.0.0.1", "localhost"), retries=0)


def test_a_proxy_that_cannot_be_used(server: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "gopher://127.0.0.1:9")
    with pytest.raises(UserError, match="a proxy or certificate file named in the environment cannot"):
        client(server.url)
