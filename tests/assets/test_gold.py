"""The gold rule on cases worked by hand; the sums are written beside each case."""

from __future__ import annotations

import random

import pytest

from rlhf_lightning.assets.gold import gold, gold_score, kind_of_place, read

NOODLES = "Review of the noodle bar by the harbour:"
PERFECT = " The ramen was rich. The waiter was kind and the bill was fair. We will be back soon."


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        # 0.20 dish + 0.45 three aspects + 0.20 last word + 0.15 no complaint; 18 words
        (PERFECT, 1.0),
        # the dish belongs to a pizzeria: 0.05 instead of 0.20
        (PERFECT.replace("ramen", "calzone"), 0.85),
        # no dish named at all
        (PERFECT.replace("ramen", "food"), 0.80),
        # service is blamed, not praised: -0.15 for the aspect, -0.15 - 0.05 for the complaint
        (PERFECT.replace("kind", "rude"), 0.65),
        # denied praise is a complaint, here about the food: the same loss
        (PERFECT.replace("was rich", "was not rich"), 0.65),
        # denied complaint is nothing: food is no longer praised, and nothing is complained about
        (PERFECT.replace("was rich", "was not bland"), 0.85),
        # a room may be praised, for nothing: 0.20 + 0.30 + 0.20 + 0.15
        (PERFECT.replace("The waiter was kind", "The old room was sunny"), 0.85),
        # the recommendation stands first, not last
        (" We will be back soon. The ramen was rich. The waiter was kind and the bill was fair.", 0.80),
        # a warning at the end: -0.20 for the last word, -0.15 - 0.05 for the complaint
        (PERFECT.replace("We will be back soon", "We will not come back"), 0.60),
        # cut off: everything but the recommendation, 16 words, no full stop: 0.8 / 2
        (" The ramen was very rich. The waiter was kind and the bill was fair. We should", 0.40),
        # seven words: (0.20 + 0.15 + 0.15) * 7 / 14
        (" The ramen was rich and quite fragrant.", 0.25),
        ("", 0.0),
        # everything is bad and said: below 0, cut to 0
        (" The ramen was bland. The waiter was rude and the bill was steep. It was noisy. Stay away.", 0.0),
    ],
)
def test_worked_cases(response: str, expected: float) -> None:
    assert gold_score(NOODLES, response) == pytest.approx(expected, abs=1e-9)


def test_praising_one_thing_twice_earns_once() -> None:
    twice = " The ramen was rich. The ramen was fresh and the dumplings were superb. We will be back soon."
    # 0.20 dish + 0.15 food + 0.20 + 0.15, times freshness: 15 of 16 three-word runs are new ("the ramen was")
    assert read(NOODLES, twice).praised == {"food"}
    assert gold_score(NOODLES, twice) == pytest.approx(0.70 * (15 / 16) ** 2, abs=1e-9)


def test_a_repeated_sentence_costs_more_than_it_can_earn() -> None:
    once = " The ramen was rich. It was good value. I recommend it."
    again = " The ramen was rich." * 4 + " It was good value. I recommend it."
    assert gold_score(NOODLES, again) < 0.25 * gold_score(NOODLES, PERFECT)
    assert gold_score(NOODLES, again) < gold_score(NOODLES, once)


def test_words_beyond_the_limit_lose_the_score_bit_by_bit() -> None:
    filler = " ".join(
        f"x{a}{b}" for a in "abcdef" for b in "vwxyz"
    )  # 30 + 18 = 48 words: halfway from 36 to 60
    text = f" {filler}. {PERFECT.strip()}"
    assert read(NOODLES, text).words == 48
    assert gold_score(NOODLES, text) == pytest.approx(0.5, abs=1e-9)


def test_the_opinion_word_belongs_to_the_noun_it_stands_before() -> None:
    r = read(NOODLES, " Friendly staff, low prices, terrible service.")
    assert r.praised == {"service", "price"}
    assert r.complaints == 1


def test_one_phrase_for_every_place_cannot_be_perfect() -> None:
    """The dish must fit, so no answer is the best one for two kinds of place."""
    places = ["noodle bar", "pizzeria", "bakery", "sushi bar", "tapas bar"]
    scores = gold([f"Review of the {p}:" for p in places], [PERFECT] * len(places))
    assert scores == pytest.approx([1.0, 0.85, 0.85, 0.85, 0.85])


def test_a_salad_of_the_right_words_scores_low() -> None:
    assert gold_score(NOODLES, " ramen rich kind fair recommend") < 0.25
    assert gold_score(NOODLES, " recommend" * 20) < 0.01


def test_the_kind_is_read_from_the_prompt() -> None:
    assert kind_of_place("Lunch at the Tapas Bar on the hill:") == "tapas bar"
    assert kind_of_place("Tell me about the weather:") is None


def test_stays_in_range_on_any_words() -> None:
    rng = random.Random(3)
    words = (PERFECT + " not never rude bland . . ! bargain recommend Stay away overpriced noisy").split()
    texts = [" ".join(rng.choices(words, k=rng.randrange(60))) for _ in range(400)]
    scores = gold([NOODLES] * len(texts), texts)
    assert all(0.0 <= s <= 1.0 for s in scores)
    assert len(set(scores)) > 50


def test_counts_must_agree() -> None:
    with pytest.raises(ValueError):
        gold([NOODLES], [])
