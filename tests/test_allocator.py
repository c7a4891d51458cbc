"""What the libraries below keep stays small."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlhf_lightning import allocator

# The bounds are read at the first product of a process, so each case is a process of its own.
GROWTH = """
import ctypes
import torch
from rlhf_lightning.allocator import bound_shape_caches

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
bound_shape_caches()
weight = torch.randn(768, 256).bfloat16()
product = lambda tokens: torch.randn(tokens, 256).bfloat16() @ weight.T
for tokens in range(64, 164):
    product(tokens)
before = libc.mallinfo2().uordblks
for tokens in range(164, 564):
    product(tokens)
print((libc.mallinfo2().uordblks - before) >> 20)
"""


@pytest.mark.skipif(not hasattr(allocator._libc(), "mallinfo2"), reason="counts the heap of glibc 2.33")
def test_products_of_ever_new_shapes_hold_no_more_memory():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16, "MB: the caches of 1,024 shapes grow by far more"


def test_the_environment_overrules_the_bounds(monkeypatch):
    monkeypatch.setattr(allocator.os, "environ", found := {"LRU_CACHE_CAPACITY": "512"})
    allocator.bound_shape_caches()
    assert found == {"LRU_CACHE_CAPACITY": "512", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
