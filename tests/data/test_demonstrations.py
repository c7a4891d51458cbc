"""Demonstrations: the prompt as PPO feeds it, the answer as the model writes it, its end included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhf_lightning.config.schema import DataConfig
from rlhf_lightning.data.demonstrations import load_demonstrations
from rlhf_lightning.data.preferences import load_split, pair_prompts
from rlhf_lightning.data.prompts import load_prompts
from rlhf_lightning.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [
    {"prompt": "the soup", "completion": " was warm"},
    {"prompt": "a slow waiter", "completion": " brought it cold"},
    {"prompt": "nothing on the menu", "completion": " was fresh"},
]


def asked(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokenizer(model_folders):
    return AutoTokenizer.from_pretrained(model_folders["llama"])


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tokenizer, path: str, *, max_length: int = 100, **settings):
    settings = {"held_out_share": 0.0} | settings
    return load_demonstrations(DataConfig(path=path, **settings), tokenizer, max_length=max_length)


def texts(tokenizer, shown) -> list[tuple[str, str]]:
    return [
        (tokenizer.decode(one.ids[: one.learned]), tokenizer.decode(one.ids[one.learned :])) for one in shown
    ]


def test_prompts_are_those_of_ppo_and_answers_end_once(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    shown, held_out = load(tokenizer, path)
    asked = load_prompts(DataConfig(path=path), tokenizer, room=100)
    assert [list(one.ids[: one.learned]) for one in shown] == asked.ids and held_out == []
    end = tokenizer.eos_token
    assert texts(tokenizer, shown) == [(row["prompt"], row["completion"] + end) for row in ROWS]


def test_the_better_side_of_pairs_is_learned(tokenizer, tmp_path):
    pair = {"prompt": "the soup", "chosen": " was warm", "rejected": " was cold"}
    hh = {key: f"\n\nHuman: soup?\n\nAssistant:{pair[key]}" for key in ("chosen", "rejected")}
    for rows, prompt in (([pair], "the soup"), ([hh], "\n\nHuman: soup?\n\nAssistant:")):
        shown, _ = load(tokenizer, write(tmp_path / "pairs.jsonl", rows))
        assert texts(tokenizer, shown) == [(prompt, " was warm" + tokenizer.eos_token)]


def test_plain_text_is_all_answer(tokenizer, tmp_path):
    (tmp_path / "lines.txt").write_text("the soup was warm\n")
    (one,), _ = load(tokenizer, str(tmp_path / "lines.txt"), format="text")
    assert one.learned == 0 and tokenizer.decode(one.ids) == "the soup was warm" + tokenizer.eos_token


def test_a_conversation_takes_the_template_and_its_own_end(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    turns = [{"role": "user", "content": "soup?"}, {"role": "assistant", "content": "was warm"}]
    rows = [
        {"prompt": turns[:1], "completion": "was warm"},
        {"prompt": turns[:1], "completion": turns[1:]},
    ]
    asked = load_prompts(DataConfig(path=write(tmp_path / "p.jsonl", rows)), tokenizer, room=100)
    shown, _ = load(tokenizer, str(tmp_path / "p.jsonl"))
    assert [list(one.ids[: one.learned]) for one in shown] == asked.ids
    assert texts(tokenizer, shown) == [("<user>soup?<assistant>", "was warm" + tokenizer.eos_token)] * 2
    shown, _ = load(tokenizer, write(tmp_path / "m.jsonl", [{"messages": turns}]))
    assert texts(tokenizer, shown) == [("<user>soup?<assistant>", "was warm" + tokenizer.eos_token)]


def test_what_is_too_long_loses_the_beginning_of_its_prompt_then_the_end_of_its_answer(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS[:1])
    (whole,), _ = load(tokenizer, path)
    answer = len(whole.ids) - whole.learned
    (short,), _ = load(tokenizer, path, max_length=answer + 1)
    assert short.learned == 1 and short.ids == whole.ids[whole.learned - 1 :]
    (tight,), _ = load(tokenizer, path, max_length=2)
    assert tight.learned == 1 and tight.ids[1:] == whole.ids[whole.learned : whole.learned + 1]


def test_a_share_is_held_out_by_the_prompt(tokenizer, tmp_path):
    rows = [{"prompt": f"the soup {i % 40}", "completion": f" was {i}"} for i in range(120)]
    train, held_out = load(tokenizer, write(tmp_path / "rows.jsonl", rows), held_out_share=0.3)
    sides = [{one.ids[: one.learned] for one in side} for side in (train, held_out)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40 and 4 <= len(sides[1]) <= 20


@pytest.mark.parametrize(
    "rows, settings, sentence",
    [
        ([{"prompt": "a", "answer": "b"}], {}, "data.completion_field=completion: no column 'completion'"),
        (
            [ROWS[0], {"prompt": "a", "completion": " "}],
            {},
            "1 of 2 rows teach nothing (line 2 has an empty answer)",
        ),
        ([{"prompt": "a", "completion": 3}], {}, "'completion' must be text or a list of one"),
        ([ROWS[0], {"prompt": "a"}], {}, "(line 2 has no value in column 'completion'); data.drop_bad=true"),
        ([{"prompt": 3, "completion": "b"}], {}, "line 1: 'prompt' must be text or a list of messages"),
        ([{"messages": ["a"]}], {}, "line 1: a conversation is a list of messages"),
        ([{"messages": [said("b")]}], {}, "line 1: the conversation begins with the assistant's answer"),
        (
            [{"messages": [asked("a")]}],
            {},
            "1 of 1 rows teach nothing (line 1 has no answer of an assistant)",
        ),
        ([{"messages": [asked("a"), said("b")]}], {}, "no chat template"),
        (ROWS, {"first_words": 2}, "data.first_words=2 cuts prompts"),
        (ROWS, {"overlong": "error", "max_prompt_length": 1}, "data.overlong=error: the prompt in line 1"),
        (ROWS, {"overlong": "drop", "max_prompt_length": 1}, "leaves none of the 3 answers"),
        (ROWS, {"held_out_share": 0.99}, "data.held_out_share=0.99"),
        ([{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}], {}, "no chat template"),
    ],
)
def test_bad_rows_get_a_sentence(tokenizer, tmp_path, rows, settings, sentence):
    tokenizer.chat_template = None
    with pytest.raises(UserError) as caught:
        load(tokenizer, write(tmp_path / "rows.jsonl", rows), **settings)
    assert sentence in str(caught.value)


def test_empty_answers_are_left_out_on_request(tokenizer, tmp_path):
    bad = [{"prompt": "a", "completion": ""}, {"prompt": "a"}]
    shown, _ = load(tokenizer, write(tmp_path / "rows.jsonl", [ROWS[0], *bad]), drop_bad=True)
    assert texts(tokenizer, shown) == [("the soup", " was warm" + tokenizer.eos_token)]


def test_every_answer_of_a_conversation_is_learned_behind_all_that_was_said(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    turns = [asked("soup?"), said("warm"), asked("bread?"), said("fresh"), asked("rice?")]
    expected = [
        ("<user>soup?<assistant>", "warm<eos>"),
        ("<user>soup?<assistant>warm<eos><user>bread?<assistant>", "fresh<eos>"),
    ]
    for rows in ([{"messages": turns}], [{"prompt": "soup?", "messages": turns}], [{"prompt": turns[:4]}]):
        shown, _ = load(tokenizer, write(tmp_path / "m.jsonl", rows))
        found = [(p.replace("\n", ""), answer) for p, answer in texts(tokenizer, shown)]
        assert found == expected


def test_the_seam_falls_as_in_running_text_or_the_prompt_stays_as_it_is(tokenizer, tmp_path):
    rows = [{"prompt": "the", "completion": " soup"}, {"prompt": "the sou", "completion": "p"}]
    shown, _ = load(tokenizer, write(tmp_path / "rows.jsonl", rows))
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in ("the soup", "the sou", "p")]
    assert ids[0][: len(ids[1])] != ids[1]  # together, this seam would lie within a token
    assert [list(one.ids[:-1]) for one in shown] == [ids[0], ids[1] + ids[2]]


def test_the_first_words_of_a_line_are_given(tokenizer, tmp_path):
    (tmp_path / "lines.txt").write_text("the soup was warm\nbread is\n")
    path, settings = str(tmp_path / "lines.txt"), {"first_words": 2, "held_out_share": 0.0}
    with pytest.raises(UserError, match=r"line 2 has no more than 2 words"):
        load(tokenizer, path, **settings)
    shown, _ = load(tokenizer, path, drop_bad=True, **settings)
    assert texts(tokenizer, shown) == [("the soup", " was warm" + tokenizer.eos_token)]
    assert (
        list(shown[0].ids[:2])
        == load_prompts(DataConfig(path=path, **settings), tokenizer, room=9).ids[0][:2]
    )
    with pytest.raises(UserError, match=r"data\.system_prompt=Be kind: lines of plain text"):
        load(tokenizer, path, system_prompt="Be kind")


def test_long_prompts_are_cut_as_for_ppo_and_counted(tokenizer, tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", ROWS)
    asked_for = load_prompts(DataConfig(path=path, max_prompt_length=2), tokenizer, room=100)
    with caplog.at_level("WARNING"):
        shown, _ = load(tokenizer, path, max_prompt_length=2)
    assert [list(one.ids[: one.learned]) for one in shown] == asked_for.ids
    assert f"{asked_for.truncated} of 3 prompts lose their beginning" in caplog.text


MESSAGES = [
    {"chosen": [asked(f"soup {i}"), said("a")], "rejected": [asked(f"soup {i}"), said("b")]}
    for i in range(40)
]
HH = [{k: f"\n\nHuman: soup {i}?\n\nAssistant: {k}" for k in ("chosen", "rejected")} for i in range(40)]
COLUMNS = [{"prompt": f"soup {i} ", "completion": "a", "chosen": "a", "rejected": "b"} for i in range(40)]


@pytest.mark.parametrize("template", ["auto", "always"])
@pytest.mark.parametrize("rows", [MESSAGES, HH, COLUMNS], ids=["messages", "hh", "columns"])
def test_every_stage_holds_the_same_prompts_out(tokenizer, tmp_path, rows, template):
    tokenizer.chat_template = TEMPLATE
    path = write(tmp_path / "rows.jsonl", rows)
    config = DataConfig(path=path, held_out_share=0.3, chat_template=template)
    shown = load_demonstrations(config, tokenizer, max_length=100)
    parts = [
        load_prompts(config, tokenizer, room=100, part=part, share=0.3) for part in ("train", "held_out")
    ]
    assert [[list(one.ids[: one.learned]) for one in side] for side in shown] == [part.ids for part in parts]
    pairs = [pair_prompts(side, config, tokenizer) for side in load_split(config)]
    assert [[text for _, text in side] for side in pairs] == [part.texts for part in parts]
