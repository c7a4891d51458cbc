"""Tokens per second by a known clock; peaks that do not leak from one job into the next."""

from __future__ import annotations

import sys

import pytest
import torch

from rlhf_lightning.callbacks import Throughput, build_callbacks
from rlhf_lightning.callbacks.throughput import peak_memory, reset_peak_memory

CPU = torch.device("cpu")


def test_tokens_over_the_wall_time_of_the_iteration(tmp_path, make_config, make_toy, fit):
    toy = make_toy(make_config(2), [0.1, 0.2], seconds=0.2)
    fit(toy, tmp_path, callbacks=[Throughput()])
    # 9 tokens in 0.2 s and a little: at most 45 a second. A quarter leaves room for a busy machine.
    assert 45 / 4 < toy.metrics["throughput/tokens_per_s"] <= 45


def test_the_order_is_what_each_needs(tmp_path, make_config):
    names = [type(callback).__name__ for callback in build_callbacks(make_config(2), tmp_path)]
    own = [
        "BeforeAfter",
        "Throughput",
        "Guard",
        "Samples",
        "Metrics",
        "Summary",
        "Progress",
        "Checkpoints",
        "Interrupt",
    ]
    assert names == own
    without = [type(callback).__name__ for callback in build_callbacks(make_config(2, show=0), tmp_path)]
    assert without == names[1:]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the high-water mark of a process")
def test_the_peak_of_one_job_is_not_the_next_job_s(tmp_path, make_config, make_toy, fit):
    """Entry 79: the first job touches 256 MiB more than the second."""
    peaks = []
    for size in (2**26, 1):
        toy = make_toy(make_config(1), [0.1])
        step = toy.training_step

        def hungry_step(*arguments, size=size, step=step):
            torch.ones(size).sum()
            step(*arguments)

        toy.training_step = hungry_step
        fit(toy, tmp_path, callbacks=[Throughput()])
        peaks.append(toy.metrics["memory/peak_gb"])
    assert peaks[0] - peaks[1] > 0.2


def test_peak_memory_is_in_gib():
    reset_peak_memory(CPU)
    before = peak_memory(CPU)
    block = torch.ones(2**27)  # 0.5 GiB
    during = peak_memory(CPU)
    assert block.numel() and 0.45 < during - before < 0.6
    assert 0.05 < before < 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_on_a_gpu():
    device = torch.device("cuda", 0)
    torch.ones(2**28, device=device)
    reset_peak_memory(device)
    before = peak_memory(device)
    block = torch.ones(2**27, device=device)
    assert block.numel() and abs(peak_memory(device) - before - 0.5) < 0.01
