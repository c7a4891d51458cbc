"""A hub that cannot be reached is found out at once."""

from __future__ import annotations

import socket
import threading

import pytest

from rlhf_lightning.config import network
from rlhf_lightning.config.schema import Config

REGEX = {"kind": "regex", "pattern": "a"}


def config(**settings) -> Config:
    return Config(**({"reward": REGEX} | settings))


def test_what_is_embedded_or_on_disk_asks_for_no_hub(tmp_path):
    assert not network.names_hub(config())
    assert not network.names_hub(config(model={"path": str(tmp_path)}))
    assert network.names_hub(config(model={"path": "someone/some-model"}))
    assert network.names_hub(config(reward={"kind": "classifier", "path": "someone/judge"}))
    judge = {"kind": "classifier", "path": "someone/judge"}
    assert network.names_hub(config(reward={"kind": "combined", "parts": {"a": {"reward": judge}}}))


def test_a_host_that_listens_is_reachable_and_a_closed_port_is_not(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    thread = threading.Thread(target=lambda: server.accept()[0].close(), daemon=True)
    thread.start()
    assert network.reachable(f"http://127.0.0.1:{port}")
    thread.join()
    server.close()
    assert not network.reachable(f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert network.reachable(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("answers", [True, False])
def test_offline_is_set_only_where_the_hub_is_needed_and_silent(monkeypatch, answers):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(network, "reachable", lambda endpoint: answers)
    network.stay_local_without_network(config())
    assert "HF_HUB_OFFLINE" not in network.os.environ
    network.stay_local_without_network(config(model={"path": "someone/some-model"}))
    assert network.os.environ.get("HF_HUB_OFFLINE") == (None if answers else "1")
