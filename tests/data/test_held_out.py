"""Which side of the split a prompt falls on, and what a stage reads of it."""

import json

import pytest

from rlhf_lightning.config.schema import DataConfig
from rlhf_lightning.data.held_out import held_out_source, is_held_out, share_held_out
from rlhf_lightning.data.prompts import load_prompts
from rlhf_lightning.errors import UserError

TEXTS = [f"table {number}" for number in range(200)]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [*TEXTS, *TEXTS[:50]]  # some of them twice
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    return file


def test_the_split_is_by_text_and_near_its_share():
    kept = sum(is_held_out(text, 0.25) for text in TEXTS)
    assert 30 < kept < 70  # 50 expected, deviation 6
    assert not any(is_held_out(text, 0.0) for text in TEXTS)
    assert all(is_held_out(text, 0.3) for text in TEXTS if is_held_out(text, 0.25))


@pytest.mark.parametrize(
    ("share", "stage", "evaluating", "kept"),
    [
        (None, "sft", False, 0.1),
        (None, "dpo", False, 0.1),
        (None, "ppo", False, 0.0),
        (None, "ppo", True, 0.1),
        (0.3, "ppo", False, 0.3),
        (0.0, "dpo", False, 0.0),
    ],
)
def test_ppo_learns_from_all_unless_it_evaluates(share, stage, evaluating, kept):
    assert share_held_out(share, stage=stage, evaluating=evaluating) == kept


def test_both_sides_are_all_prompts_and_share_none(path, plain_tokenizer):
    sides = {
        part: load_prompts(DataConfig(path=str(path)), plain_tokenizer, room=99, part=part, share=0.2)
        for part in ("train", "held_out", "all")
    }
    ids = {part: {tuple(row) for row in prompts.ids} for part, prompts in sides.items()}
    assert len(sides["train"]) + len(sides["held_out"]) == len(sides["all"]) == 250
    assert not ids["train"] & ids["held_out"]
    assert sides["train"].left == len(sides["held_out"]) > 0
    assert f"{len(sides['held_out'])} on the other side of data.held_out_share" in sides["train"].report


def test_rows_of_their_own_leave_the_file_whole(path, tmp_path, plain_tokenizer):
    other = tmp_path / "held_out.jsonl"
    other.write_text('{"prompt": "warm soup"}\n')
    config = DataConfig(path=str(path), held_out=str(other))
    assert len(load_prompts(config, plain_tokenizer, room=99, part="train", share=0.5)) == 250
    found = load_prompts(config, plain_tokenizer, room=99, part="held_out", share=0.5)
    assert (found.path, found.read) == (str(other), 1)


def test_the_embedded_prompts_have_held_out_ones(plain_tokenizer):
    config = DataConfig(path="tiny", held_out="tiny", format="csv")  # the format is that of data.path
    with pytest.raises(UserError):
        load_prompts(config, plain_tokenizer, room=999, part="train")
    assert len(load_prompts(config, plain_tokenizer, room=999, part="held_out")) == 64


def test_an_empty_side_is_a_sentence(tmp_path, plain_tokenizer):
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt": "warm soup"}\n')
    held = is_held_out("warm soup", 0.5)
    part = "train" if held else "held_out"
    with pytest.raises(
        UserError, match=r"data.held_out_share=0.5 of the 1 prompts of data.path=.* leaves none to"
    ):
        load_prompts(DataConfig(path=str(file)), plain_tokenizer, room=99, part=part, share=0.5)


def test_the_embedded_held_out_rows_have_their_own_form() -> None:
    """``data.format`` says how the user's rows are stored, not the embedded ones."""
    config = DataConfig(path="mine.csv", format="csv", held_out="tiny")
    found = held_out_source(config, "pairs_heldout.jsonl")
    assert found.format == "auto" and found.path.endswith("tiny/pairs_heldout.jsonl")
    other = held_out_source(config.model_copy(update={"held_out": "other.csv"}), "pairs_heldout.jsonl")
    assert (other.path, other.format) == ("other.csv", "csv")
