"""The shipped tiny world: sizes, formats, what the model writes, and the reward that is stored with it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the builders live beside the package, not in it

from rlhf_lightning.assets import TINY_FILES, tiny_path  # noqa: E402
from rlhf_lightning.assets.gold import gold, gold_score  # noqa: E402
from scripts.tiny.grammar import lexicon, lovely_review, review  # noqa: E402
from scripts.tiny.language_model import sample_reviews, sft_texts  # noqa: E402
from scripts.tiny.pairs import CLEAR, FLIPPED  # noqa: E402
from scripts.tiny.prompts import FORMS, MOODS, SETTINGS, heldout_places  # noqa: E402
from scripts.tiny.reward import Scorer  # noqa: E402

SEED = 0


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in tiny_path(name).read_text().splitlines()]


def facts() -> dict[str, float]:
    return json.loads((tiny_path("reward") / "reward.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_path("model"), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(
        tiny_path("model"), dtype=torch.float32, local_files_only=True
    ).eval()


def test_everything_is_there_and_small() -> None:
    assert all(tiny_path(name).exists() for name in TINY_FILES)
    files = [f for f in tiny_path("model").parent.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 8_000_000
    assert (tiny_path("model") / "model.safetensors").stat().st_size < 5_000_000
    with pytest.raises(ValueError, match=r"no part 'modle'.*prompts_heldout\.jsonl"):
        tiny_path("modle")


def test_the_paths_cost_no_heavy_import() -> None:
    code = (
        "import sys, rlhf_lightning.assets, rlhf_lightning.assets.gold;"
        "sys.exit(bool({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_file_names_the_machine_that_built_it() -> None:
    for file in tiny_path("model").parent.rglob("*.json"):
        assert not re.search(r'"/\w|[A-Za-z]:\\\\', file.read_text()), file


def test_model_is_a_stock_llama_of_one_to_three_million(model: LlamaForCausalLM) -> None:
    assert type(model) is LlamaForCausalLM
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    assert model.config.hidden_size % 64 == 0 and model.config.intermediate_size % 64 == 0
    assert model.config.tie_word_embeddings
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_tokenizer_specials_and_round_trip(
    tokenizer: PreTrainedTokenizerBase, model: LlamaForCausalLM
) -> None:
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert 1000 <= len(tokenizer) <= 1500 and len(tokenizer) == model.config.vocab_size
    pair = rows("pairs_heldout.jsonl")[0]
    for text in (pair["prompt"] + pair["chosen"], "Zażółć gęślą jaźń, 100 % naïve\n\tcafé 🍜", " ,  . don't"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)


def test_prompt_and_response_meet_at_a_token_border(tokenizer: PreTrainedTokenizerBase) -> None:
    """So the ids of the sampled answer and those of the judged text agree."""
    for pair in rows("pairs_heldout.jsonl")[:50]:
        parts = tokenizer(pair["prompt"])["input_ids"] + tokenizer(pair["chosen"])["input_ids"]
        assert tokenizer(pair["prompt"] + pair["chosen"])["input_ids"] == parts


def test_chat_template(tokenizer: PreTrainedTokenizerBase, model: LlamaForCausalLM) -> None:
    chat = [{"role": "user", "content": "Review of the bakery on the hill:"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>Review of the bakery on the hill:<|review|>"
    done = [*chat, {"role": "assistant", "content": " Go there."}]
    assert tokenizer.apply_chat_template(done, tokenize=False) == text + " Go there.<|end|>"
    answers, ended = sample_reviews(model, tokenizer, [text] * 16, seed=0)
    assert sum(ended) >= 15
    assert all(a.startswith(" ") for a in answers)


def test_prompts_are_distinct_and_heldout_places_are_unseen() -> None:
    train, heldout = rows("prompts.jsonl"), rows("prompts_heldout.jsonl")
    assert len({r["prompt"] for r in train}) == len(train) == 256
    assert len({r["prompt"] for r in heldout}) == len(heldout) == 64
    kept_out = heldout_places(SEED)
    assert len(FORMS) * (1 + len(MOODS)) * len(SETTINGS) > 1000

    def places(name: str) -> set[tuple[str, str]]:
        texts = [r["prompt"] for r in rows(name)]
        return {(k, s) for k, s in kept_out for t in texts if f"{k} {s}" in t}

    for name in ("prompts.jsonl", "pairs.jsonl"):
        assert places(name) == set()
    for name in ("prompts_heldout.jsonl", "pairs_heldout.jsonl"):
        assert all(any(f"{k} {s}" in r["prompt"] for k, s in kept_out) for r in rows(name))


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs_heldout.jsonl"])
def test_pairs_are_well_formed_and_mostly_agree_with_gold(name: str) -> None:
    pairs = rows(name)
    for pair in pairs:
        assert set(pair) == {"prompt", "chosen", "rejected"}
        assert pair["prompt"].endswith(":") and pair["chosen"] != pair["rejected"]
        assert pair["chosen"].startswith(" ") and pair["rejected"].startswith(" ")
    prompts = [p["prompt"] for p in pairs]
    better, worse = gold(prompts, [p["chosen"] for p in pairs]), gold(prompts, [p["rejected"] for p in pairs])
    flipped = sum(a < b for a, b in zip(better, worse, strict=True)) / len(pairs)
    assert flipped == pytest.approx(FLIPPED, abs=0.015)
    assert min(abs(a - b) for a, b in zip(better, worse, strict=True)) > CLEAR - 1e-9
    if name == "pairs.jsonl":
        assert 2000 <= len(pairs) <= 3200


def test_grammar_repeats_itself_by_seed() -> None:
    kept_out = heldout_places(SEED)
    first = sft_texts(40, random.Random("x"), kept_out=kept_out)
    assert first == sft_texts(40, random.Random("x"), kept_out=kept_out)
    assert first != sft_texts(40, random.Random("y"), kept_out=kept_out)
    assert heldout_places(SEED) == kept_out != heldout_places(SEED + 1)
    assert len({r for _, r in first}) == 40


def test_grammar_agrees_with_itself() -> None:
    rng = random.Random(5)
    for prompt in ("Lunch at the taco stand:", "Review of the bakery:") * 100:
        text = review(prompt, rng, quality=rng.random())
        assert not re.search(r"[{}\[\]|]|  |\ba [aeiou]|\.\.", text), text
        assert re.fullmatch(r"( [A-Z][^.]*\.)+", text), text
        assert not re.search(r"\b(burritos|churros|fish tacos|croissants|staff) was\b", text), text
        assert not re.search(r"\b(guacamole|sourdough|cheesecake|waiter|owner|host) were\b", text), text


def test_the_best_answers_of_the_grammar_are_gold() -> None:
    rng = random.Random(1)
    prompts = [r["prompt"] for r in rows("prompts_heldout.jsonl")]
    best = [lovely_review(p, rng, judge=gold_score) for p in prompts]
    assert gold(prompts, best) == pytest.approx([1.0] * len(prompts))
    assert len(set(best)) > 0.9 * len(best)


def test_greedy_answers_use_known_words(tokenizer: PreTrainedTokenizerBase, model: LlamaForCausalLM) -> None:
    known = lexicon()
    prompts = [r["prompt"] for r in rows("prompts_heldout.jsonl")[:16]]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    out = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=64,
    )
    for text in tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True):
        words = re.findall(r"[a-z']+", text.lower())
        assert len(words) >= 5 and text.endswith("."), text
        assert set(words) <= known, set(words) - known


def test_samples_end_vary_and_leave_room_to_improve(
    tokenizer: PreTrainedTokenizerBase, model: LlamaForCausalLM
) -> None:
    prompts = [r["prompt"] for r in rows("prompts_heldout.jsonl")] * 2
    texts, ended = sample_reviews(model, tokenizer, prompts, seed=7)
    assert sum(ended) / len(ended) >= 0.97
    assert len(set(texts)) >= 0.95 * len(texts)
    scores = gold(prompts, texts)
    assert 0.25 <= sum(scores) / len(scores) <= 0.5
    words = [w for t in texts for w in re.findall(r"[a-z']+", t.lower())]
    known = lexicon()
    assert sum(w in known for w in words) / len(words) > 0.99


def test_the_stored_reward_is_the_one_described() -> None:
    known, pairs = facts(), rows("pairs_heldout.jsonl")[:100]
    scorer = Scorer("none")
    assert scorer.head.weight.dtype == torch.float32 == scorer.head.bias.dtype
    chosen, rejected = scorer.sides(pairs)
    assert chosen.mean().item() == pytest.approx(known["chosen_mean_first_100"], abs=2e-3)
    accuracy = (chosen > rejected).float().mean().item()
    assert accuracy == pytest.approx(known["pair_accuracy_first_100"], abs=0.011)
    assert known["chosen_mean"] == pytest.approx(0.0, abs=0.2)  # centred on nf4 weights
    assert known["pair_accuracy_heldout"] >= 0.9
    assert known["nf4_correlation"] > 0.98
    assert known["best_mean"] > known["start_mean"] + 1.0
