"""The application's threads: scoring holds up nothing else, and never runs twice at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import torch
import uvicorn

from rlhf_lightning.serving.app import make_app
from rlhf_lightning.types import Scores


def test_health_answers_while_a_batch_is_scored_and_batches_take_turns() -> None:
    started, release = threading.Event(), threading.Event()
    inside, most = 0, 0

    def reward(prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        started.set()
        assert release.wait(20)
        inside -= 1
        return Scores(torch.ones(len(responses)), {})

    bound = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(make_app(reward, model="slow"), log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    body = {"prompts": ["p"], "responses": ["r"]}
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(httpx.post, f"{address}/score", json=body, timeout=30) for _ in range(3)]
        assert started.wait(20)
        health = httpx.get(f"{address}/health", timeout=10)
        assert health.json() == {"status": "ok", "model": "slow"} and not any(a.done() for a in asked)
        release.set()
        assert [a.result().json() for a in asked] == [{"scores": [1.0]}] * 3
    assert most == 1
    server.should_exit = True
    thread.join(10)
