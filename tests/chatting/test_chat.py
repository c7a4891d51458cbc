"""The terminal chat: a real process on the embedded model, and its parts on small ones."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rlhf_lightning import chat
from rlhf_lightning.chatting.conversation import Conversation
from rlhf_lightning.chatting.loop import Answering, Chat
from rlhf_lightning.chatting.stream import for_terminal, pieces, sample, spell
from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.config.schema import GenerationConfig, ModelConfig
from rlhf_lightning.data.dialogue import ChatTemplate
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import ppo_cast
from rlhf_lightning.rewards.learned import LearnedReward
from rlhf_lightning.rollout.generate import generate, texts

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "My review of the diner:"
TINY = {"path": "tiny", "quantization": "none", "dtype": "float32"}


@pytest.fixture
def tiny_run(tmp_path, disturb):
    """A finished PPO run on the embedded model, whose policy says something else than its reference."""
    config = ModelConfig(**TINY)
    torch.manual_seed(3)
    roles = ActorCritic(
        load_backbone(config),
        config,
        cast=ppo_cast(config, reward_path="tiny", critic=False),
        temperature=1.0,
    )
    with torch.no_grad():
        for parameter in roles.parameters_of("policy"):
            parameter.add_(torch.randn_like(parameter) * 0.02)
    folder = tmp_path / "run"
    roles.save(folder / "adapters")
    settings = {"stage": {"name": "ppo"}, "model": TINY, "reward": {"kind": "learned", "path": "tiny"}}
    (folder / "config_resolved.yaml").write_text(yaml.safe_dump(settings))
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
    return folder, roles


def test_a_piped_conversation(tiny_run, prompts_for, tmp_path):
    folder, roles = tiny_run
    lines = [PROMPT, "/score", "/reference", "/scor", "", "/reset", "/score", "/quit", "never read"]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_lightning.chat", str(folder), "--plain", "--temperature", "0",
         "--max-new-tokens", "12"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=200, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    prompts = prompts_for(roles, (PROMPT,))
    greedy = generate(roles, prompts, GenerationConfig(max_new_tokens=12), seed=0, iteration=0, greedy=True)
    (answer,) = texts(greedy, roles.backbone.tokenizer)
    kept: list[int] = []
    said = sample(roles, prompts.ids[0], "reference", limit=12, greedy=True, seed=0, turn=1)
    reference = "".join(pieces(said, roles.backbone.tokenizer, kept=kept))
    judge = LearnedReward(roles.score, roles.backbone.tokenizer, LearnedRewardConfig(kind="learned"))
    score = judge([PROMPT], [answer]).scores.item()
    assert answer != reference
    assert done.stdout == f"{answer}\nscore {score:+.3f}\n{reference}\n"
    for told in (
        f"RUN: run {folder} (stage ppo, finished), its policy adapter",
        "/scor is no command; did you mean /score?",
        "the conversation starts anew",
        "there is no answer yet to score",
    ):
        assert told in done.stderr


@pytest.fixture
def talk(build, disturb):
    """``talk(lines, **settings) -> (out, aside, chat)`` on a small model without a chat template."""

    def make(lines, *, limit=6, reward=None, room=100, roles=None, **rest):
        roles = roles or disturb(build())
        out, aside = io.StringIO(), io.StringIO()
        conversation = Conversation(roles.backbone.tokenizer, room, rest.pop("template", None))
        greedy = rest.pop("greedy", True)
        one = Chat(
            roles, conversation, Answering(limit, greedy=greedy, seed=0), reward, "no reward model",
            out=out, aside=aside, **rest,
        )  # fmt: skip
        going = [one.take(line) for line in lines]
        return out.getvalue(), aside.getvalue(), one, going

    return make


def test_sampled_tokens_are_those_of_a_rollout(build, disturb, prompts_for):
    roles = disturb(build())
    prompts = prompts_for(roles, ("the soup",))
    rollout = generate(roles, prompts, GenerationConfig(max_new_tokens=10), seed=4, iteration=2)
    answer = list(sample(roles, prompts.ids[0], "policy", limit=10, greedy=False, seed=4, turn=2))
    assert answer == rollout.response_ids[0, : rollout.lengths[0]].tolist()
    other = list(sample(roles, prompts.ids[0], "policy", limit=10, greedy=False, seed=4, turn=3))
    assert answer != other


def test_pieces_hold_whole_characters_and_make_the_whole_text(build):
    tokenizer = build().backbone.tokenizer
    text = "soup \u20ac12, na\u00efve \U0001f35c!"  # bytes of two, three and four tokens
    ids = tokenizer(text).input_ids
    kept: list[int] = []
    found = list(pieces(iter(ids), tokenizer, kept=kept))
    assert "".join(found) == text and kept == ids
    assert not any("\ufffd" in piece for piece in found) and "\U0001f35c" in found
    torn = ids[:-2]  # an emoji that never ends
    assert "".join(pieces(iter(torn), tokenizer, kept=[])) == spell(torn, tokenizer)


def test_an_answer_cannot_command_the_terminal():
    assert for_terminal("a\tb\nc\x1b[2J\x07\u202e\r") == "a\tb\nc\\x1b[2J\\x07\\u202e\\r"


def test_the_conversation_goes_on_and_starts_anew(talk):
    out, aside, one, going = talk(["the soup", "//we", "/help", "/quit"])
    assert going == [True, True, True, False]
    first, second = (turn["content"] for turn in one.conversation.turns[1::2])
    assert out == f"{for_terminal(first)}\n{for_terminal(second)}\n"
    assert one.conversation.text() == f"the soup{first}\n/we{second}"
    assert "/reference" in aside and "(cut after 6 tokens)" in aside
    one.take("/reset")
    assert one.conversation.turns == []


def test_without_a_reward_or_a_reference_it_says_so(talk):
    aside = talk(["/reference", "we", "/score"])[1]
    assert "no message yet" in aside and "no reward model" in aside
    aside = talk(["we", "/reference"], no_reference="what the policy started from is gone")[1]
    assert aside.endswith("what the policy started from is gone\n")


def test_ctrl_c_keeps_what_was_said_and_the_conversation(talk, build, disturb):
    class Hasty(io.StringIO):
        def write(self, text):
            super().write(text)
            if text.strip():
                raise KeyboardInterrupt
            return len(text)

    one = talk(["the soup"], roles=disturb(build()), limit=6)[2]
    one.out, one.aside = Hasty(), io.StringIO()
    assert one.take("we") is True
    assert one.aside.getvalue() == "(stopped)\n"
    assert one.conversation.turns[-1]["content"] == one._answer
    assert for_terminal(one._answer).startswith(one.out.getvalue().rstrip("\n"))


def test_a_full_context_drops_the_oldest_turns_and_says_so(build):
    tokenizer = build().backbone.tokenizer
    talk = Conversation(tokenizer, 20, None)
    for message in ("the soup was warm", "a slow waiter", "nothing on the menu"):
        talk.ask(message)
        talk.answer(" and cold")
    talk.ask("we")
    ids, notes = talk.prompt()
    assert len(ids) <= 20 and talk.turns[0]["role"] == "user"
    assert tokenizer.decode(ids).endswith("\nwe") and len(talk.turns) < 7
    assert "left the conversation: the model's context is full" in notes[0]
    talk.reset()
    talk.ask("rice " * 40)
    ids, notes = talk.prompt()
    assert len(ids) == 20 and "only its last 20 were read" in notes[0]


def test_the_chat_template_is_used_where_there_is_one(tiny_run):
    tokenizer = tiny_run[1].backbone.tokenizer
    talk = Conversation(tokenizer, 100, ChatTemplate.of(tokenizer))
    talk.ask("A diner")
    talk.answer(" Good.")
    talk.ask("A bar")
    assert talk.text() == "<|user|>A diner<|review|> Good.<|end|><|user|>A bar<|review|>"
    ids, notes = talk.prompt()
    assert tokenizer.decode(ids) == talk.text() and notes == []


def test_a_template_that_refuses_is_told_and_the_message_forgotten(talk, tiny_run):
    roles = tiny_run[1]
    one = talk([], roles=roles, template=ChatTemplate.of(roles.backbone.tokenizer))[2]
    one.conversation.system = "Be brief."  # the embedded template knows no system message
    assert one.take("A diner") is True
    assert "the tokenizer's chat template refuses the conversation" in one.aside.getvalue()
    assert one.conversation.turns == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "RUN=nowhere: there is no such folder"),
        (["RUN", "--reward", "RUN"], "--reward=RUN holds a policy, not a reward model"),
        (["tiny", "--max-new-tokens", "512"], "--max-new-tokens 512 leaves no room for a message"),
    ],
)
def test_bad_commands(tiny_run, capsys, words, sentence):
    run = str(tiny_run[0])
    assert chat.main([word.replace("RUN", run) for word in words]) == 1
    assert sentence.replace("RUN=", "\0").replace("RUN", run).replace("\0", "RUN=") in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--temperature", "-1"], ["--temperature", "nan"], ["--max-new-tokens", "0"]]
)
def test_bad_numbers(words, capsys):
    with pytest.raises(SystemExit) as ended:
        chat.main(["RUN", *words])
    assert ended.value.code == 2 and "must be a" in capsys.readouterr().err
