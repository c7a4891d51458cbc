"""Preference pairs: split where they part, refused where they teach nothing."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhf_lightning.config.schema import DataConfig
from rlhf_lightning.data.dialogue import hh_messages, split_pair
from rlhf_lightning.data.preferences import Pair, load_pairs, load_split, pair_prompts
from rlhf_lightning.data.prompts import load_prompts
from rlhf_lightning.errors import UserError

ASK = "\n\nHuman: soup?\n\nAssistant:"
GOOD = {"prompt": "soup?", "chosen": "hot", "rejected": "cold"}


def write(path: Path, rows: list[dict]) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(path=str(path))


def test_three_columns(tmp_path: Path) -> None:
    assert load_pairs(write(tmp_path / "a.jsonl", [GOOD])) == [Pair("soup?", "hot", "cold")]


def test_the_hh_form_zipped(tmp_path: Path) -> None:
    row = {"chosen": ASK + " Hot.", "rejected": ASK + " Hot water."}
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    assert load_pairs(DataConfig(path=str(path))) == [Pair(ASK, " Hot.", " Hot water.")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (ASK + " Yes.", ASK + " No.", ASK),
        # They part at the first answer, and one of them goes on for a turn.
        (ASK + " Yes.\n\nHuman: sure?\n\nAssistant: Sure.", ASK + " No.", ASK),
        # One answer holds a mark of its own; what they share ends inside that mark.
        (ASK + " Yes.\n\nAssistant: Or no.", ASK + " Yes.\n\nAsk.", ASK),
        (ASK, ASK + " No.", ASK),
    ],
)
def test_split_pair(chosen: str, rejected: str, prompt: str) -> None:
    found = split_pair(chosen, rejected)
    assert found[0] == prompt
    assert (found[0] + found[1], found[0] + found[2]) == (chosen, rejected)


def test_hh_messages() -> None:
    assert hh_messages("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\nd\n\nAssistant:") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd"},
    ]
    with pytest.raises(ValueError, match="does not begin with"):
        hh_messages("hello" + ASK)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            {**GOOD, "rejected": "hot"},
            r"1 of 2 pairs teach nothing \(line 2: chosen and rejected are equal\)",
        ),
        ({**GOOD, "chosen": " "}, r"line 2: the chosen answer is empty"),
        ({**GOOD, "rejected": ""}, r"line 2: the rejected answer is empty"),
    ],
)
def test_pairs_that_teach_nothing(tmp_path: Path, caplog, bad: dict, said: str) -> None:
    config = write(tmp_path / "a.jsonl", [GOOD, bad])
    with pytest.raises(UserError, match=said):
        load_pairs(config)
    with caplog.at_level(logging.WARNING):
        assert load_pairs(config.model_copy(update={"drop_bad": True})) == [Pair("soup?", "hot", "cold")]
    assert "1 of 2 pairs teach nothing" in caplog.text
    with pytest.raises(UserError, match="1 of 1 pairs teach nothing"):
        load_pairs(write(tmp_path / "b.jsonl", [bad]).model_copy(update={"drop_bad": True}))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "soup?", "chosen": "hot"}, "line 2 has no value in column 'rejected'"),
        ({**GOOD, "chosen": ["hot"]}, "line 2: the last message of 'chosen' must be the assistant's"),
        ({"chosen": "a", "rejected": "b"}, "line 2 has no value in column 'prompt'"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, row: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_pairs(write(tmp_path / "a.jsonl", [GOOD, row]))


def test_a_pair_without_a_common_cue(tmp_path: Path) -> None:
    config = write(tmp_path / "a.jsonl", [{"chosen": "a", "rejected": "b"}])
    with pytest.raises(UserError, match=r"line 1: chosen and rejected share no '\\n\\nAssistant:'"):
        load_pairs(config)


def test_the_embedded_pairs() -> None:
    pairs = load_pairs(DataConfig(path="tiny"))
    assert all(pair.prompt.endswith(":") for pair in pairs)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "soup?"}]


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*ASKED, said("hot")], "rejected": [*ASKED, said("cold")]},
        {"prompt": "soup?", "chosen": [*ASKED, said("hot")], "rejected": [*ASKED, said("cold")]},
        {"prompt": ASKED, "chosen": [said("hot")], "rejected": [said("cold")]},
        {"prompt": ASKED, "chosen": "hot", "rejected": "cold"},
    ],
)
def test_conversations_take_the_template_as_for_ppo(tmp_path: Path, model_folders, row: dict) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    tokenizer.chat_template = TEMPLATE
    config = write(tmp_path / "a.jsonl", [row])
    (pair,) = load_pairs(config)
    assert (pair.chosen, pair.rejected) == ("hot", "cold")
    asked = write(tmp_path / "b.jsonl", [{"prompt": ASKED}])
    ppo = load_prompts(asked, tokenizer, room=100)
    assert pair_prompts([pair], config, tokenizer) == [(ppo.ids[0], ppo.texts[0])]
    assert "<user>soup?<assistant>" in ppo.texts[0]


def test_plain_and_hh_prompts_are_those_of_ppo(tmp_path: Path, model_folders) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    tokenizer.chat_template = TEMPLATE
    hh = {"chosen": ASK + " Hot.", "rejected": ASK + " Cold."}
    for row, template in ((GOOD, "auto"), (GOOD, "always"), (hh, "auto"), (hh, "always")):
        config = write(tmp_path / "a.jsonl", [row]).model_copy(update={"chat_template": template})
        ppo = load_prompts(config, tokenizer, room=100)
        assert pair_prompts(load_pairs(config), config, tokenizer) == [(ppo.ids[0], ppo.texts[0])]


def test_a_pair_may_have_no_prompt(tmp_path: Path, model_folders) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    config = write(tmp_path / "a.jsonl", [{**GOOD, "prompt": ""}, GOOD])
    (ids, text), _ = pair_prompts(load_pairs(config), config, tokenizer)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text == ""


def test_conversations_that_part_before_their_end_are_refused(tmp_path: Path) -> None:
    row = {"chosen": [*ASKED, said("hot")], "rejected": [{**ASKED[0], "content": "tea?"}, said("cold")]}
    with pytest.raises(UserError, match="line 1: chosen and rejected are conversations that differ"):
        load_pairs(write(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize("margin", ["wide", -1, None, True])
def test_a_margin_is_a_number_of_at_least_zero(tmp_path: Path, margin) -> None:
    config = write(tmp_path / "a.jsonl", [{**GOOD, "gap": 2}, {**GOOD, "gap": margin}])
    config = config.model_copy(update={"margin_field": "gap"})
    with pytest.raises(UserError, match="line 2"):
        load_pairs(config)
    assert load_pairs(config.model_copy(update={"limit": 1}))[0].margin == 2.0


def test_a_split_that_leaves_a_side_empty_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(UserError, match=r"data\.held_out_share=0\.1 of the 1 pairs"):
        load_split(config)
