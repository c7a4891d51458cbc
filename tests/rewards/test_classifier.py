"""A separate classifier, fed text: tiny Llama, GPT-2 and BERT made on the spot (faults 29 to 33)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_lightning.config.rewards import ClassifierRewardConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.classifier import ClassifierReward

WORDS = ["<unk>", "<s>", "</s>", "<pad>", "good", "bad", "the", "soup", "was", "warm", "and", "bread", "cold"]
TEXTS = [
    ("the soup ", "was warm"),
    ("the ", "bread was good and warm and the soup was cold"),
    ("bad ", ""),
    ("the bread ", "was bad </s>"),  # ends with the end token, which is also the pad token
    ("</s> the soup ", "was </s> cold and good"),  # and holds it inside
    ("and ", "and and and"),
    ("good ", "good"),
    ("the cold cold soup ", "was good </s> </s>"),
]
PROMPTS, RESPONSES = [p for p, _ in TEXTS], [r for _, r in TEXTS]


def tokenizer_of(words: list[str], *, pad: str | None, wrap: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if wrap is not None:
        specials = [(word, words.index(word)) for word in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=wrap, special_tokens=specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token=pad
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    size, shared = len(WORDS), {"initializer_range": 0.3}
    llama = {
        "vocab_size": size, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "num_labels": 1, **shared,
    }  # fmt: skip
    bert = BertConfig(
        vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, num_labels=3,
        **shared,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=size, n_embd=16, n_layer=2, n_head=2, n_positions=32, num_labels=2, eos_token_id=2,
        bos_token_id=1, pad_token_id=None, **shared,
    )  # fmt: skip
    made = {
        "llama": (LlamaForSequenceClassification(LlamaConfig(**llama, pad_token_id=2)), "</s>", None),
        "gpt2": (GPT2ForSequenceClassification(gpt2), None, None),
        "bert": (BertForSequenceClassification(bert), "<pad>", "<s> $A </s>"),
        "bos": (LlamaForSequenceClassification(LlamaConfig(**llama)), "<pad>", "<s> $A"),
        "headless": (LlamaForCausalLM(LlamaConfig(**llama)), "</s>", None),
    }  # fmt: skip
    found = {}
    for name, (model, pad, wrap) in made.items():
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
        tokenizer_of(WORDS, pad=pad, wrap=wrap).save_pretrained(found[name])
    return found


def reward_of(folder: Path, **settings: object) -> ClassifierReward:
    return ClassifierReward(ClassifierRewardConfig(kind="classifier", path=str(folder), **settings))


def direct(reward: ClassifierReward, text: str) -> torch.Tensor:
    """The logits of one text with no padding at all, read at its last token."""
    ids = reward.tokenizer(text, return_tensors="pt").input_ids
    kept = reward.text_config.pad_token_id
    reward.text_config.pad_token_id = None
    with torch.no_grad():
        logits = reward.model(input_ids=ids).logits[0]
    reward.text_config.pad_token_id = kept
    return logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bos"])
def test_faults_30_31_32_each_score_is_that_of_the_row_alone(folders: dict[str, Path], family: str) -> None:
    expected = [direct(reward_of(folders[family]), p + r)[-1].item() for p, r in TEXTS]
    assert len({round(value, 3) for value in expected}) == len(TEXTS)  # the rows can be told apart
    for batch_size in (1, 3, 8):
        scored = reward_of(folders[family], batch_size=batch_size)(PROMPTS, RESPONSES)
        assert scored.scores.tolist() == pytest.approx(expected, abs=1e-5)
        assert scored.scores.dtype == torch.float32 and scored.parts == {}


def test_fault_31_the_plain_library_call_reads_such_a_row_elsewhere(folders: dict[str, Path]) -> None:
    """What is guarded against is real: with pad = eos the end token itself is skipped."""
    reward = reward_of(folders["llama"])
    text = "the bread was bad </s>"
    reward.text_config.pad_token_id = 2
    with torch.no_grad():
        plain = reward.model(
            **reward.tokenizer([text], return_tensors="pt", return_token_type_ids=False)
        ).logits
    assert plain.item() != pytest.approx(direct(reward, text).item(), abs=1e-3)
    assert reward(["the bread "], ["was bad </s>"]).scores.item() == pytest.approx(
        direct(reward, text).item(), abs=1e-5
    )


def test_fault_29_the_classifier_reads_text_with_its_own_tokenizer(tmp_path: Path) -> None:
    """A model whose score is 1 at its own id of "good"; the policy's tokenizer has that id for "bad"."""
    swapped = [{"good": "bad", "bad": "good"}.get(word, word) for word in WORDS]
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=4, intermediate_size=4, num_hidden_layers=1,
            num_attention_heads=1, num_labels=1,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        embedding = model.get_input_embeddings().weight
        embedding[:, 1] = 1.0
        embedding[swapped.index("good")] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # RMS norm makes the 1 a 2
        model.score.weight[0, 0] = 0.5
    model.save_pretrained(tmp_path)
    tokenizer_of(swapped, pad="<pad>").save_pretrained(tmp_path)
    assert reward_of(tmp_path)(["the "] * 2, ["good", "bad"]).scores.tolist() == pytest.approx(
        [1.0, 0.0], abs=1e-4
    )


def test_fault_33_one_bos_whether_the_text_brings_it_or_not(folders: dict[str, Path]) -> None:
    reward = reward_of(folders["bos"])
    assert reward._encode("the soup") == reward._encode("<s> the soup") == [1, 6, 7]
    assert reward._encode("<s> the <s> soup") == [1, 6, 1, 7]
    once, twice = reward(["the ", "<s> the "], ["soup", "soup"]).scores.tolist()
    assert once == pytest.approx(twice, abs=1e-6)
    plain = reward_of(folders["llama"])  # adds none itself: the text's own stays
    assert plain._encode("<s> the") == [1, 6]


def test_truncation_keeps_the_end_and_the_specials(folders: dict[str, Path]) -> None:
    bert = reward_of(folders["bert"], max_length=5)
    assert bert._encode("the soup was warm and good") == [1, 9, 10, 4, 2]
    assert reward_of(folders["llama"], max_length=2)._encode("the soup was bad") == [8, 5]
    assert len(reward_of(folders["gpt2"], max_length=500)._encode("good " * 100)) == 32  # its positions
    assert bert(["the "] * 2, ["soup was warm and good", "warm and good"]).scores.unique().numel() == 1


def test_response_only_does_not_see_the_prompt(folders: dict[str, Path]) -> None:
    reward = reward_of(folders["llama"], response_only=True)
    a, b, c = reward(["bad ", "the cold soup ", "bad "], ["good", "good", "warm"]).scores.tolist()
    assert a == pytest.approx(b, abs=1e-6) and a != pytest.approx(c, abs=1e-3)
    assert a == pytest.approx(direct(reward, "good").item(), abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_fault_82c_an_empty_answer_is_scored(folders: dict[str, Path], family: str) -> None:
    scored = reward_of(folders[family], response_only=True)(["the soup ", "good "], ["", "was warm"])
    assert scored.scores.isfinite().all() and scored.scores.unique().numel() == 2
    assert reward_of(folders[family])([], []).scores.shape == (0,)


def test_label_and_probability(folders: dict[str, Path]) -> None:
    bert, text = folders["bert"], ("the soup ", "was warm")
    logits = direct(reward_of(bert), "".join(text))
    for label in (0, 1, 2, -1, -3):
        assert reward_of(bert, label=label)([text[0]], [text[1]]).scores.item() == pytest.approx(
            logits[label].item()
        )
    share = reward_of(bert, label=1, probability=True)([text[0]], [text[1]]).scores.item()
    assert share == pytest.approx(logits.softmax(0)[1].item())
    single = reward_of(folders["llama"], probability=True)([text[0]], [text[1]]).scores.item()
    logit = direct(reward_of(folders["llama"]), "".join(text)).item()
    assert single == pytest.approx(1 / (1 + 2.718281828**-logit), abs=1e-5)
    with pytest.raises(UserError, match=r"reward\.label must be in -3\.\.2 for the 3 logits of .*, got 3"):
        reward_of(bert, label=3)


def test_fault_63_dropout_is_off_whoever_woke_it(folders: dict[str, Path]) -> None:
    reward = reward_of(folders["bert"])
    first = reward(PROMPTS, RESPONSES).scores
    reward.model.train()
    assert torch.equal(reward(PROMPTS, RESPONSES).scores, first)
    assert not reward.model.training and not any(p.requires_grad for p in reward.model.parameters())


def test_a_missing_head_is_refused_instead_of_drawn_at_random(folders: dict[str, Path]) -> None:
    with pytest.raises(
        UserError, match=r"reward\.path=.* not a trained sequence classifier: it holds no score\.weight"
    ):
        reward_of(folders["headless"])


def test_missing_weights_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^reward\.path=.*absent: no sequence classifier could be loaded"):
        reward_of(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^reward\.path=.*: no sequence classifier could be loaded"):
        reward_of(tmp_path)
