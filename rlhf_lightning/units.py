"""Numbers and sizes in three digits, for a person."""

from __future__ import annotations

from collections.abc import Sequence


def count_text(count: int) -> str:
    """A number of parameters in three digits: 938, 12.3k, 1.24M, 6.74B."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T"))


def bytes_text(size: int) -> str:
    """A size in three digits, in units of 1024: 512 B, 3.50 MiB."""
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    step = 0
    while value >= base and step < len(units) - 1:
        value /= base
        step += 1
    digits = 0 if step == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}{units[step]}"
