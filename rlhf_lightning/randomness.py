"""Counted randomness: every draw has its own seed, made from the run's seed and what the draw is for."""

from __future__ import annotations

import hashlib
import json
import operator


def counted_seed(seed: int, *purpose: int | str) -> int:
    """A seed for one purpose, such as ``counted_seed(seed, "prompts", epoch)``.

    The same arguments give the same number in every process, on every machine and under every Python version;
    arguments that differ in any value, order or type (``1`` and ``"1"``) give unrelated ones.

    Args:
        seed: the run's seed.
        purpose: what is drawn, and the counters that place it.

    Returns:
        An integer from 0 to 2^63 - 1, fit for ``torch.Generator.manual_seed``.

    Raises:
        TypeError: if an argument is neither an integer nor a string.
    """
    # JSON tells ("ab",) from ("a", "b") and 1 from "1"; index() lets NumPy's integers count as numbers.
    parts = [part if isinstance(part, str) else operator.index(part) for part in purpose]
    digest = hashlib.sha256(json.dumps([operator.index(seed), *parts]).encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
