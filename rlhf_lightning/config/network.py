"""Is the model hub within reach? Asked once: a missing model is a sentence now and not five retries later."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlparse

from rlhf_lightning.config.schema import Config

HUB = "https://huggingface.co"
PATIENCE_S = 5.0


def stay_local_without_network(config: Config) -> None:
    """Tell the hub's libraries to use their cache alone, where a hub id is named and the hub does not answer.

    They read ``HF_HUB_OFFLINE`` when they are imported: call this before.
    """
    stay_local(paths_of(config))


def stay_local(paths: Iterable[str | None]) -> None:
    """The same for paths that no config holds."""
    if on_hub(paths) and not reachable(os.environ.get("HF_ENDPOINT", HUB)):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def names_hub(config: Config) -> bool:
    """Whether some path of the config is neither embedded nor on this disk."""
    return on_hub(paths_of(config))


def paths_of(config: Config) -> list[str | None]:
    """Every path of the config that may be a hub id."""
    rewards = (getattr(reward, "path", None) for reward in config.single_rewards.values())
    others = (config.model.adapter, config.data.held_out, config.evaluate.against)
    return [config.model.path, config.data.path, *rewards, *others]


def on_hub(paths: Iterable[str | None]) -> bool:
    return any(path not in ("tiny", None) and not Path(str(path)).expanduser().exists() for path in paths)


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
