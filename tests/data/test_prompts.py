"""Prompts: ids and texts that agree, one BOS, one cue, none empty, none too long (known faults 33 and 82)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.config.schema import DataConfig
from rlhf_lightning.data.prompts import PromptSet, load_prompts
from rlhf_lightning.errors import UserError

CUE = "<|im_start|>assistant\n"


@pytest.fixture
def load(tmp_path: Path):
    """Rows -> prompts, by way of a real file."""

    def loader(tokenizer: Any, rows: list[Any], *, room: int = 1000, **settings: Any) -> PromptSet:
        path = tmp_path / "prompts.jsonl"
        values = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return load_prompts(DataConfig(path=str(path), **settings), tokenizer, room=room)

    return loader


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(1, count + 1))


class TestLength:
    def test_82a_twelve_ids_cut_to_eight_keep_the_last_eight_and_are_counted(
        self, word_tokenizer, load
    ) -> None:
        found = load(word_tokenizer, [words(12), words(8)], max_prompt_length=8)
        assert found.ids == [list(range(5, 13)), list(range(1, 9))]
        assert (found.truncated, found.dropped) == (1, 0)
        assert "1 cut to their last tokens" in found.report

    def test_82a_the_cue_survives(self, chatml_tokenizer, load) -> None:
        found = load(chatml_tokenizer, [chat("soup " * 50)], max_prompt_length=12)
        cue = chatml_tokenizer(CUE, add_special_tokens=False)["input_ids"]
        assert found.ids[0][-len(cue) :] == cue
        assert len(found.ids[0]) == 12

    def test_a_bos_stays_in_front_of_a_cut_prompt(self, make_tokenizer, load) -> None:
        tokenizer = make_tokenizer(bos=True)
        (whole,) = load(tokenizer, ["the soup was hot and the bread was warm"]).ids
        (cut,) = load(tokenizer, ["the soup was hot and the bread was warm"], max_prompt_length=4).ids
        assert cut == [tokenizer.bos_token_id, *whole[-3:]]

    def test_82b_the_text_is_what_the_ids_spell(self, chatml_tokenizer, load) -> None:
        found = load(chatml_tokenizer, [chat("the soup was hot " * 9), "日本 🍜 soup"], max_prompt_length=14)
        assert found.truncated == 1
        assert found.texts == [chatml_tokenizer.decode(row, skip_special_tokens=True) for row in found.ids]
        assert found.texts[1] == "日本 🍜 soup"
        assert len(found.texts[0]) < len("the soup was hot " * 9)

    def test_drop(self, word_tokenizer, load) -> None:
        found = load(word_tokenizer, [words(12), words(3)], max_prompt_length=8, overlong="drop")
        assert (found.ids, found.dropped, found.read) == ([[1, 2, 3]], 1, 2)
        assert "1 left out as too long" in found.report

    def test_error(self, word_tokenizer, load) -> None:
        with pytest.raises(UserError, match=r"line 2 .* 12 tokens, more than data\.max_prompt_length=8"):
            load(word_tokenizer, [words(8), words(12)], max_prompt_length=8, overlong="error")

    def test_82d_a_prompt_as_long_as_the_room_fits_and_one_token_more_does_not(
        self, word_tokenizer, load
    ) -> None:
        assert load(word_tokenizer, [words(12)], room=12).ids == [list(range(1, 13))]
        said = r"line 1 .* 12 tokens.*room for 11; set data\.max_prompt_length=11 or less"
        with pytest.raises(UserError, match=said):
            load(word_tokenizer, [words(12)], room=11)
        assert len(load(word_tokenizer, [words(12)], room=11, max_prompt_length=11).ids[0]) == 11

    @pytest.mark.parametrize("room", [0, -16])
    def test_82d_no_room_at_all(self, word_tokenizer, load, room: int) -> None:
        with pytest.raises(UserError, match=rf"max_new_tokens is too large.*room for {room} prompt tokens"):
            load(word_tokenizer, [words(1)], room=room)

    def test_82e_all_filtered_out(self, word_tokenizer, load) -> None:
        said = r"^0 of 3 prompts left: data\.max_prompt_length=1 is too small \(the shortest .* 2 tokens\)"
        with pytest.raises(UserError, match=said):
            load(word_tokenizer, [words(4), words(2), words(3)], max_prompt_length=1, overlong="drop")


class TestRows:
    def test_82f_a_wrong_column_lists_the_columns(self, word_tokenizer, load) -> None:
        said = (
            r"data\.prompt_field=promt: no column 'promt' in .*columns are prompt, id; did you mean 'prompt'"
        )
        with pytest.raises(UserError, match=said):
            load(word_tokenizer, [{"prompt": "w1", "id": 1}], prompt_field="promt")

    def test_82f_a_row_without_the_field_is_named(self, word_tokenizer, load) -> None:
        with pytest.raises(UserError, match="line 2 has no value in column 'prompt'"):
            load(word_tokenizer, [{"prompt": "w1"}, {"id": 7}])

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ("", "line 2: the prompt is empty"),
            (" \n", "line 2: the prompt is empty"),
            ([], "line 2: the conversation is empty"),
            (chat(" "), "line 2: the last message is empty"),
            (chat("hi", "hello"), "line 2: the conversation ends with the assistant's answer"),
            ([{"from": "human", "value": "hi"}], r"line 2: each message needs .*one has keys from, value"),
            (["hi"], r"line 2: each message needs .*one has str"),
            (
                [{"role": "user", "content": ["hi"]}],
                "line 2: the content of a message must be text, not list",
            ),
            (5, "line 2: a prompt is text or a list of messages, not int"),
        ],
    )
    def test_unusable_prompts_are_refused_with_their_row(self, chatml_tokenizer, load, row, said) -> None:
        with pytest.raises(UserError, match=said):
            load(chatml_tokenizer, ["the soup", row])

    def test_a_prompt_without_tokens_is_refused(self, word_tokenizer, load) -> None:
        """This tokenizer has no BOS and drops what it does not know: the encoding can be empty."""
        assert word_tokenizer("***")["input_ids"] == []
        with pytest.raises(UserError, match=r"line 2: no tokens in the prompt '\*\*\*'"):
            load(word_tokenizer, ["w1", "***"])

    def test_limit_and_first_words(self, plain_tokenizer, load) -> None:
        found = load(plain_tokenizer, ["the  soup was hot", "bread", "never read"], limit=2, first_words=2)
        assert found.texts == ["the  soup", "bread"]

    def test_plain_text_needs_no_column(self, plain_tokenizer, tmp_path: Path) -> None:
        (tmp_path / "lines.neg").write_bytes(b"dull caf\xe9 . \nwarm\n")
        config = DataConfig(path=str(tmp_path / "lines.neg"), format="text")
        assert load_prompts(config, plain_tokenizer, room=99).texts == ["dull café .", "warm"]

    def test_the_report_counts(self, word_tokenizer, load, tmp_path: Path) -> None:
        found = load(word_tokenizer, [words(2), words(5), words(3)])
        assert found.report == f"3 prompts from {tmp_path}/prompts.jsonl, 2 to 5 tokens (median 3)"


class TestTemplate:
    def test_a_conversation_takes_it_and_a_plain_string_does_not(self, chatml_tokenizer, load) -> None:
        found = load(chatml_tokenizer, [chat("hot soup"), "hot soup"])
        decoded = chatml_tokenizer.batch_decode(found.ids)
        assert decoded == [f"<|im_start|>user\nhot soup<|im_end|>\n{CUE}", "hot soup"]
        assert found.texts == [
            "user\nhot soup\nassistant\n",
            "hot soup",
        ]  # what a reward may see: no specials
        assert found.templated == 1

    def test_always_wraps_a_plain_string(self, chatml_tokenizer, load) -> None:
        found = load(chatml_tokenizer, ["hot soup"], chat_template="always")
        assert found.ids == load(chatml_tokenizer, [chat("hot soup")]).ids

    def test_never_takes_a_single_message_bare_and_refuses_more(self, chatml_tokenizer, load) -> None:
        assert load(chatml_tokenizer, [chat("hot soup")], chat_template="never").texts == ["hot soup"]
        with pytest.raises(UserError, match=r"data\.chat_template=never: line 1 .* 3 messages"):
            load(chatml_tokenizer, [chat("a", "b", "c")], chat_template="never")

    def test_system_prompt_comes_first_unless_the_row_has_its_own(self, chatml_tokenizer, load) -> None:
        rows = [chat("soup"), chat("soup", system="Be rude.")]
        found = load(chatml_tokenizer, rows, system_prompt="Be kind.")
        kind, rude = chatml_tokenizer.batch_decode(found.ids)
        assert kind.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nsoup")
        assert "Be kind." not in rude and rude.count("<|im_start|>system") == 1
        assert found.own_system == 1

    def test_a_system_prompt_that_nothing_would_show_is_refused(self, chatml_tokenizer, load) -> None:
        with pytest.raises(UserError, match=r"data\.system_prompt needs a chat template, and line 1"):
            load(chatml_tokenizer, ["soup"], system_prompt="Be kind.")

    def test_no_template_to_be_had(self, plain_tokenizer, load) -> None:
        with pytest.raises(UserError, match=r"data\.chat_template=always: the model's tokenizer has no chat"):
            load(plain_tokenizer, ["soup"], chat_template="always")
        with pytest.raises(UserError, match=r"data\.chat_template=auto: line 1 .* is a conversation"):
            load(plain_tokenizer, [chat("soup")])

    def test_a_template_that_refuses_says_why(self, make_tokenizer, load) -> None:
        strict = make_tokenizer(
            template="{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
            "{% endif %}U: {{ m.content }}\n{% endfor %}A:"
        )
        with pytest.raises(UserError, match=r"chat template refuses the conversation .*no system"):
            load(strict, [chat("soup", system="x")])

    @pytest.mark.parametrize("mode", ["auto", "always"])
    @pytest.mark.parametrize("cut", ["", CUE, "\n" + CUE], ids=["whole", "no cue", "no newline, no cue"])
    def test_82g_a_templated_string_is_known_and_its_cue_occurs_once(
        self, chatml_tokenizer, load, mode: str, cut: str
    ) -> None:
        once = chatml_tokenizer.apply_chat_template(
            chat("soup", "hot", "bread"), tokenize=False, add_generation_prompt=True
        )
        found = load(chatml_tokenizer, [once.removesuffix(cut), once.rstrip()], chat_template=mode)
        assert chatml_tokenizer.batch_decode(found.ids) == [once, once]
        assert (found.already_templated, found.templated) == (2, 0)

    def test_82g_a_plain_string_that_only_speaks_of_chat_is_plain(
        self, chatml_tokenizer, inst_tokenizer, load
    ) -> None:
        for tokenizer, text in (
            (chatml_tokenizer, "user and assistant"),
            (chatml_tokenizer, "what does <|im_start|>user mean ?"),
            (chatml_tokenizer, "a turn ends with <|im_end|>"),
            (inst_tokenizer, "what does [INST] mean ?"),
        ):
            assert load(tokenizer, [text]).already_templated == 0

    def test_82g_turns_in_plain_letters(self, make_tokenizer, load) -> None:
        tokenizer = make_tokenizer(
            template="{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}"
            "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
        )
        found = load(tokenizer, ["USER: soup\nASSISTANT:", "USER: soup", "soup"], chat_template="always")
        assert tokenizer.batch_decode(found.ids) == ["USER: soup\nASSISTANT:"] * 3
        assert (found.already_templated, found.templated) == (2, 1)


class TestBos:
    """Known fault 33: two BOS tokens."""

    def test_a_template_that_writes_bos_and_a_tokenizer_that_adds_one(self, inst_tokenizer, load) -> None:
        bos = inst_tokenizer.bos_token_id
        assert inst_tokenizer("<s>[INST] soup [/INST]")["input_ids"][:2] == [bos, bos], "the trap is set"
        rows = [chat("soup"), "<s>[INST] soup [/INST]", "[INST] soup [/INST]"]
        found = load(inst_tokenizer, rows)
        assert found.ids[0][0] == bos and found.ids[0].count(bos) == 1
        assert found.ids[1] == found.ids[2] == found.ids[0]

    def test_a_plain_string_gets_the_bos_that_its_tokenizer_adds_once_and_no_end(
        self, make_tokenizer, load
    ) -> None:
        tokenizer = make_tokenizer(bos=True, closes=True)
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        assert tokenizer("soup")["input_ids"][-1] == eos, "the trap is set"
        for ids in load(tokenizer, ["soup", "<s>soup", "<s><s>soup"]).ids:
            assert ids == [bos, *tokenizer("soup", add_special_tokens=False)["input_ids"]]

    def test_a_template_without_bos_gets_none(self, make_tokenizer, load) -> None:
        tokenizer = make_tokenizer(
            bos=True, template="{% for m in messages %}U: {{ m.content }}\n{% endfor %}A:"
        )
        (ids,) = load(tokenizer, [chat("soup")]).ids
        assert tokenizer.decode(ids) == "U: soup\nA:"

    def test_a_tokenizer_without_bos_adds_nothing(self, plain_tokenizer, load) -> None:
        assert plain_tokenizer.bos_token_id is None
        assert load(plain_tokenizer, ["soup"]).ids == [plain_tokenizer("soup")["input_ids"]]

    def test_a_text_of_nothing_but_bos_is_no_prompt(self, make_tokenizer, load) -> None:
        with pytest.raises(UserError, match="line 1: no tokens in the prompt '<s>'"):
            load(make_tokenizer(bos=True), ["<s>"])


class TestPairs:
    HH = "\n\nHuman: soup?\n\nAssistant: Hot.\n\nHuman: bread?\n\nAssistant:"

    def test_the_prompt_ends_with_the_last_cue(self, plain_tokenizer, load) -> None:
        row = {"chosen": self.HH + " Warm.", "rejected": self.HH + " Warm and stale."}
        assert load(plain_tokenizer, [row]).texts == [self.HH]

    def test_always_makes_a_conversation_of_it(self, chatml_tokenizer, load) -> None:
        row = {"chosen": self.HH + " Warm.", "rejected": self.HH + " Stale."}
        assert (
            load(chatml_tokenizer, [row], chat_template="always").ids
            == load(chatml_tokenizer, [chat("soup?", "Hot.", "bread?")]).ids
        )

    def test_faults_name_the_row(self, plain_tokenizer, load) -> None:
        with pytest.raises(UserError, match="line 1: chosen and rejected share no"):
            load(plain_tokenizer, [{"chosen": "a", "rejected": "b"}])
        with pytest.raises(UserError, match=r"data\.first_words=3: HH dialogues are not cut"):
            load(plain_tokenizer, [{"chosen": self.HH + "a", "rejected": self.HH + "b"}], first_words=3)
        with pytest.raises(
            UserError, match=r"data\.format=hh: no column 'chosen' in .*; the columns are prompt$"
        ):
            load(plain_tokenizer, ["soup"], format="hh")


def test_the_embedded_prompts(plain_tokenizer) -> None:
    found = load_prompts(DataConfig(path="tiny"), plain_tokenizer, room=200)
    assert all(text.endswith(":") for text in found.texts)
