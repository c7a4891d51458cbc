"""Is the model hub within reach? Asked once: a missing model is a sentence now and not five retries later."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from rlhf_lightning.config.schema import Config

HUB = "https://huggingface.co"
PATIENCE_S = 5.0


def stay_local_without_network(config: Config) -> None:
    """Tell the hub's libraries to use their cache alone, where a hub id is named and the hub does not answer.

    They read ``HF_HUB_OFFLINE`` when they are imported: call this before.
    """
    if names_hub(config) and not reachable(os.environ.get("HF_ENDPOINT", HUB)):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def names_hub(config: Config) -> bool:
    """Whether some path of the config is neither embedded nor on this disk."""
    rewards = (getattr(reward, "path", "tiny") for reward in config.single_rewards.values())
    others = (config.model.adapter, config.data.held_out, config.evaluate.against)
    paths = [config.model.path, config.data.path, *rewards, *(path or "tiny" for path in others)]
    return any(path != "tiny" and not Path(path).expanduser().exists() for path in paths)


def reachable(endpoint: str) -> bool:
    """Whether the host takes a connection; a proxy, which resolves names itself, is taken at its word."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urlparse(endpoint)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True
