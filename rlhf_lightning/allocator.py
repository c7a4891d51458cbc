"""Memory that the libraries below keep though nothing needs it: given back, or kept small."""

from __future__ import annotations

import ctypes
import os
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


def bound_shape_caches() -> None:
    """Keep matrix products of the last 64 shapes ready, not of 1,024, unless the environment says otherwise.

    On a CPU oneDNN makes code for every shape, and oneDNN and torch each keep it: 0.3 MB a shape. Packed
    micro-batches have a new number of tokens nearly every time, so that memory grew by hundreds of MB over
    the first iterations; making the code again costs no time that can be measured (docs/performance.md).
    Both read their bound at the first product of the process.
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
