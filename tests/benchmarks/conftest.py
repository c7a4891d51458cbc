"""``benchmarks`` and ``scripts`` are no part of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def toy_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two layers of random weights, grouped keys and an output matrix of its own."""
    from scripts.random_llama import llama_config, write

    folder = tmp_path_factory.mktemp("random") / "toy"
    write(folder, llama_config(layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128, vocab=1024))
    return folder
