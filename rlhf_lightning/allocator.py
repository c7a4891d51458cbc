"""Memory that was freed but is still held by the process, given back to the system."""

from __future__ import annotations

import ctypes
import platform
from functools import cache


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def give_back_freed_memory() -> None:
    """Trim glibc's heap; elsewhere nothing happens.

    What loading or a rollout frees lies in holes that the next phase's larger tensors do not fit, so that
    without this the phases' peaks add up in part (docs/performance.md has the figures).
    """
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)
