"""Real tokenizers, small enough to read, built on the spot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes its own BOS, as the templates of Llama do; closes a user turn with the cue itself.
INST = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
SPECIALS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the soup was hot and the bread was warm",
    "user assistant system human",
    "a plain room, dull food",
] * 4


def build(*, bos: bool = False, closes: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; ``bos``: it adds one; ``closes``: it also adds an end token, as some do."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>" if closes else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        **({"bos_token": "<s>"} if bos or template == INST else {}),
    )
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return build()


@pytest.fixture(scope="session")
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    return build(template=CHATML)


@pytest.fixture(scope="session")
def inst_tokenizer() -> PreTrainedTokenizerFast:
    return build(bos=True, template=INST)


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Word ``wN`` has id N, there is no BOS, and other characters have no token at all."""
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}))
    core.normalizer = normalizers.Replace(Regex("[^w0-9 ]"), "")
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>")
