"""The gold rule: what makes a review of the tiny world good. Known, exact, and cheap.

A review earns

    0.20  a dish that fits the kind of place in the prompt (a dish of another kind of place: 0.05)
    0.45  praise of the food, of the service, of the price: 0.15 for each that is praised, once
    0.20  a clear recommendation in the last sentence
    0.15  no complaint anywhere; else every complaint takes 0.05 away

and that sum, cut to [0, 1], is multiplied by

    length      1 from 14 to 36 words; in proportion below; falling to 0 at 60 words above
    fresh       the share of three-word runs that are not repeats, squared; times 0.6 for every sentence
                said before
    end         1 where the text ends a sentence (. ! ?), else 0.5

So 1.0 is the best, and it takes five different things, each said once, without a complaint. Praise that is
denied ("not fresh") is a complaint; a denied complaint ("not bland") is neither praise nor complaint.

As a reward function: ``reward.function=rlhf_lightning.assets.gold:gold``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from rlhf_lightning.assets.lexicon import (
    ASPECTS,
    COMPLAINT,
    DISHES,
    NOUNS,
    PHRASES,
    PRAISE,
    RECOMMENDATIONS,
    WARNINGS,
)

SHORTEST, LONGEST, HOPELESS = 14, 36, 60  # words
_DENIALS = frozenset(("not", "never", "hardly", "no", "neither", "nor"))
_DISH_KIND = {dish: kind for kind, dishes in DISHES.items() for dish in dishes}
_DISH = re.compile(r"\b(" + "|".join(sorted(_DISH_KIND, key=len, reverse=True)) + r")\b")
_WARNING = re.compile("|".join(WARNINGS))
_RECOMMENDATION = re.compile("|".join(RECOMMENDATIONS))
_PHRASES = tuple((re.compile(rf"\b{pattern}\b"), aspect, sign) for pattern, aspect, sign in PHRASES)


@dataclass(frozen=True)
class Reading:
    """What the rule finds in one review."""

    fitting_dish: bool = False
    other_dish: bool = False
    praised: frozenset[str] = field(default_factory=frozenset)  # of ASPECTS, and "room"
    complaints: int = 0
    recommended: bool = False
    words: int = 0
    fresh: float = 1.0  # 1 where nothing is repeated
    ended: bool = False


@cache
def _polarity() -> dict[str, dict[str, int]]:
    return {a: {**dict.fromkeys(PRAISE[a], 1), **dict.fromkeys(COMPLAINT[a], -1)} for a in PRAISE}


@cache
def _home() -> dict[str, str]:
    """The one aspect that an opinion word belongs to, for sentences that name no noun."""
    seen: dict[str, list[str]] = {}
    for aspect, words in _polarity().items():
        for word in words:
            seen.setdefault(word, []).append(aspect)
    return {word: aspects[0] for word, aspects in seen.items() if len(aspects) == 1}


def kind_of_place(prompt: str) -> str | None:
    """The kind of place that a prompt asks about, or None; the longest name wins."""
    found = [kind for kind in DISHES if re.search(rf"\b{kind}\b", prompt.lower())]
    return max(found, key=len, default=None)


def _opinions(sentence: str) -> list[tuple[str, int]]:
    """(aspect, +1 or -1) for every opinion in one lower-case sentence whose dishes are written ``dish``."""
    found: list[tuple[str, int]] = []
    for pattern, aspect, sign in _PHRASES:
        sentence, hits = pattern.subn(" ", sentence)
        found += [(aspect, sign)] * hits
    words = re.findall(r"[a-z']+", sentence)
    current: str | None = None
    for i, word in enumerate(words):
        current = NOUNS.get(word, current)
        following = NOUNS.get(words[i + 1]) if i + 1 < len(words) else None
        aspect_here = following or current or _home().get(word)
        sign = _polarity().get(aspect_here or "", {}).get(word, 0)
        if sign == 0:
            continue
        if any(w in _DENIALS or w.endswith("n't") for w in words[max(0, i - 3) : i]):
            sign = -1 if sign > 0 else 0
        if sign and aspect_here:
            found.append((aspect_here, sign))
    return found


def read(prompt: str, response: str) -> Reading:
    """What one review says, as the rule understands it."""
    text = response.strip().lower()
    kind = kind_of_place(prompt)
    dishes = [_DISH_KIND[name] for name in _DISH.findall(text)]
    sentences = [s.strip() for s in re.split(r"[.!?]+", text) if s.strip()]
    opinions = [o for s in sentences for o in _opinions(_DISH.sub("dish", s))]
    warnings = sum(len(_WARNING.findall(s)) for s in sentences)
    last = sentences[-1] if sentences else ""
    words = re.findall(r"[a-z']+", text)
    runs = list(zip(words, words[1:], words[2:], strict=False))
    fresh = (len(set(runs)) / len(runs)) ** 2 if runs else 1.0
    fresh *= 0.6 ** (len(sentences) - len(set(sentences)))
    return Reading(
        fitting_dish=kind is not None and kind in dishes,
        other_dish=any(d != kind for d in dishes),
        praised=frozenset(aspect for aspect, sign in opinions if sign > 0),
        complaints=sum(sign < 0 for _, sign in opinions) + warnings,
        recommended=bool(_RECOMMENDATION.search(last)) and not _WARNING.search(last),
        words=len(words),
        fresh=fresh,
        ended=text.endswith((".", "!", "?")),
    )


def _length_factor(words: int) -> float:
    if words < SHORTEST:
        return words / SHORTEST
    return 1.0 if words <= LONGEST else max(0.0, (HOPELESS - words) / (HOPELESS - LONGEST))


def gold_score(prompt: str, response: str) -> float:
    """The gold score of one review, in [0, 1]."""
    r = read(prompt, response)
    value = 0.20 if r.fitting_dish else 0.05 if r.other_dish else 0.0
    value += 0.15 * sum(aspect in r.praised for aspect in ASPECTS)
    value += 0.20 if r.recommended else 0.0
    value += 0.15 if r.complaints == 0 else -0.05 * r.complaints
    return min(1.0, max(0.0, value)) * _length_factor(r.words) * r.fresh * (1.0 if r.ended else 0.5)


def gold(prompts: list[str], responses: list[str]) -> list[float]:
    """The gold scores of a batch, in [0, 1]; a reward function in the project's own form.

    Args:
        prompts: B prompts; the kind of place is read from them.
        responses: B answers, special tokens stripped.
    """
    return [gold_score(p, r) for p, r in zip(prompts, responses, strict=True)]
