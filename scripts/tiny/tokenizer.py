"""The tokenizer: byte-level BPE trained on the generated text; its pad token is not its end token."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END, USER, REVIEW = "<|pad|>", "<|end|>", "<|user|>", "<|review|>"
VOCAB_SIZE = 1024
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|review|>' + message['content'] + '<|end|>' }}"
    "{%- elif message['role'] == 'user' -%}"
    "{{ '<|user|>' + message['content'] }}"
    "{%- else -%}"
    "{{ raise_exception('this template knows the roles user and assistant only') }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|review|>' }}{%- endif -%}"
)


def train_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """Train on ``texts``, save to ``folder``, return it; every byte has a token, so any text is encoded."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, USER, REVIEW],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, REVIEW],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
