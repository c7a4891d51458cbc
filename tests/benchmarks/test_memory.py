"""Counted bytes against hand-worked numbers and against a loaded model; the line; the phases' peaks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from benchmarks.adapters import write_reward_adapter
from benchmarks.fit import Line, fit
from benchmarks.memory import counted, four_models, growth_table, measured, nf4_bytes, over_one
from benchmarks.phases import PhasePeaks
from benchmarks.race.ours import composed
from benchmarks.race.task import write_prompts
from scripts.random_llama import llama_config

CODE_BOOKS = 4 * (16 + 256)  # of a quantised matrix: the 16 levels of nf4, and 256 for the blocks' maxima


def test_nf4_by_hand():
    # 16,384 weights: half a byte each, 256 blocks of 64 with a byte each, one group of 256 blocks: a float32
    assert nf4_bytes(64 * 256) == 8192 + 256 + 4


def test_the_count_is_what_a_loaded_model_weighs(toy_llama, tmp_path):
    shape = AutoConfig.from_pretrained(toy_llama)
    reward = write_reward_adapter(tmp_path / "reward", shape, rank=16, alpha=32)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 16)
    words = [f"model.path={toy_llama}", f"reward.path={reward}", f"data.path={prompts}"]
    found = measured(composed([*words, "data.chat_template=auto"]))
    expected = counted(shape)
    matrices = 7 * shape.num_hidden_layers
    assert found.pop("backbone") == pytest.approx(
        expected.pop("backbone") + matrices * CODE_BOOKS, abs=matrices * 8
    )
    assert found == expected


def test_four_roles_on_a_seven_billion_shape():
    roles = counted(llama_config())
    assert roles["backbone"] == pytest.approx(3.87e9, rel=0.01)
    assert over_one(roles) < 1.15 and four_models(roles) > 4


def test_ratios_by_hand():
    roles = {"backbone": 100.0, "policy": 4.0, "critic": 5.0, "reference": 0.0, "reward": 6.0}
    assert over_one(roles) == 1.15 and four_models(roles) == 4.09


def test_a_line_by_hand():
    assert fit([0, 1, 2], [1, 3, 5]) == Line(2.0, 1.0, 1.0)
    flat = fit([1, 2, 3], [4, 4, 4])
    assert (flat.slope, flat.intercept, flat.r2) == (0.0, 4.0, 1.0)
    # y = 0, 3, 0 over -1, 0, 1: no slope, mean 1, and the line explains nothing
    assert fit([-1, 0, 1], [0, 3, 0]) == Line(0.0, 1.0, 0.0)
    for x, y in (([1, 1], [1, 2]), ([1, 2], [1])):
        with pytest.raises(ValueError, match="two different x"):
            fit(x, y)


def test_growth_is_told_in_megabytes():
    text, line = growth_table([100, 200], [1.0, 1.5], what="tokens")
    assert line.slope == pytest.approx(0.005)
    assert text.endswith("peak = 0.500 GB + 5.000 MB x tokens (R² = 1.000)")
    assert "| 100 | 1.000 | 1.000 |" in text


def test_a_peak_belongs_to_the_phase_that_ends_with_the_mark():
    peaks = PhasePeaks(torch.device("cpu"))
    peaks.mark("load")
    held = torch.ones(300_000_000, dtype=torch.uint8)
    del held
    peaks.mark("update")
    peaks.mark("rest")
    assert peaks.peaks["update"] > peaks.peaks["rest"] + 0.2
    assert peaks.highest == max(peaks.peaks.values())
