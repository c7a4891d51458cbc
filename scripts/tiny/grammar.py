"""The grammar that writes reviews of every quality: sentence frames with choices and agreement.

A frame is text with ``[a|b|c]`` for a choice and ``{slot}`` for a word that depends on the subject.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from rlhf_lightning.assets.gold import kind_of_place
from rlhf_lightning.assets.lexicon import COMPLAINT, DISHES, PRAISE

# {D} the dish, {was} agrees with it, {good}/{bad} opinions of the aspect in hand, {good2}/{bad2} another one.
DISH_GOOD = (
    "The {D} {was} {good}[| and {good2}].",
    "[I had|We ordered|My friend chose|We shared] the {D}, and {it} {was} {good}[| and {good2}].",
    "The {D} [melted in the mouth|{was} full of flavour].",
    "[Their|The] {D} {was} [really|truly|simply] {good}.",
)
DISH_BAD = (
    "The {D} {was} {bad}[| and {bad2}].",
    "[I had|We ordered|My friend chose|We shared] the {D}, and {it} {was} {bad}.",
    "The {D} tasted of nothing, [and|so] we left half of {them}.",
    "[Sadly|Somehow|Once more], the {D} {was} {bad}.",
    "The {D} {was} not {good}[| at all].",
)
FOOD_GOOD = (
    "The [food|cooking] was {good}[| and {good2}].",
    "Every [dish|plate] was {good}.",
    "The portions were [generous|perfect].",
)
FOOD_BAD = (
    "The [food|cooking] was {bad}[| and {bad2}].",
    "Every [dish|plate] was {bad}.",
    "The portions were tiny.",
)
SERVICE_GOOD = (
    "The [waiter|waitress|owner|staff|host] {s} {good}[| and {good2}].",
    "The service was {good}.",
    "[A|One] {good} [waiter|waitress] looked after us[| all evening].",
    "The [owner|waitress|host] [greeted|served] us with a smile.",
    "The [staff|team] made us feel at home.",
)
SERVICE_BAD = (
    "The [waiter|waitress|owner|staff|host] {s} {bad}[| and {bad2}].",
    "The service was {bad}.",
    "The [waiter|waitress] [ignored us|forgot our order].",
    "We waited [an hour|forty minutes|for ages] for [a table|our drinks].",
)
PRICE_GOOD = (
    "The prices were {good}[| and {good2}].",
    "The bill was {good}.",
    "It was [good value|great value|a real bargain|worth every penny].",
    "The price was [really|quite|very] {good}.",
)
PRICE_BAD = (
    "The prices were {bad}.",
    "The bill was {bad}.",
    "[Everything|It all] was [far too expensive|overpriced].",
    "[The meal|Lunch for two] cost a fortune.",
)
ROOM_GOOD = (
    "The room was {good}[| and {good2}].",
    "The tables were clean[| and the music was calm].",
    "We sat in a {good} room.",
)
ROOM_BAD = (
    "The room was {bad}[| and {bad2}].",
    "The tables were [dirty|cramped].",
    "The music was [gloomy|noisy].",
)
ASIDES = (
    "We [went|came|stopped] there [by chance|with a map in hand|on our way home|for the first time].",
    "[I had heard a lot about it|A neighbour told us about it|We found it by accident].",
    "It [was busy|was half empty|opens at noon|closes at ten].",
    "[My sister|My brother|My friend] [read the paper|looked out at the street|fed the dog].",
)
GO = (
    "[Highly recommended|We recommend it to everyone|I recommend it].",
    "[We will be back|I will come back soon|We will return|I would go back tomorrow].",
    "[It is worth a visit|Well worth the trip|Certainly worth a detour].",
    "[Go there|Do not miss it|You should try it|You should visit soon][| while you can].",
)
STAY_AWAY = (
    "[Stay away|Never again|Save your money|Avoid it].",
    "[We will not come back|I will never return|We would not go again].",
    "[Go somewhere else|Better to eat at home][| instead].",
    "I cannot recommend it.",
)
SHRUG = (
    "[That is all I can say|So it goes|It was a normal day|Then we went home].",
    "[Perhaps it was the weather|Maybe others will like it|It depends on the day].",
)
PAIRED_GOOD = (
    "The [waiter|owner|waitress] was {service} and the bill was {price}.",
    "The prices were {price} and the [staff were|service was] {service}.",
    "The {D} {was} {food} and the [waiter|host] was {service}.",
    "The {D} {was} {food} and the prices were {price}.",
)
MIXED = (
    "The {D} {was} {food}, but the [waiter|owner|waitress] was {bad_service}.",
    "The {D} {was} {bad_food}, but the [waiter|owner|waitress] was {service}.",
    "The [staff|waiters] were {service}, but the prices were {bad_price}.",
    "The bill was {price}, but the {D} {was} {bad_food}.",
)
FRAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dish": (DISH_GOOD, DISH_BAD),
    "food": (FOOD_GOOD, FOOD_BAD),
    "service": (SERVICE_GOOD, SERVICE_BAD),
    "price": (PRICE_GOOD, PRICE_BAD),
    "room": (ROOM_GOOD, ROOM_BAD),
}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def _expand(frame: str, rng: random.Random) -> str:
    return _CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), frame)


def _dish_opinions(table: dict[str, tuple[str, ...]], aspect: str) -> tuple[str, ...]:
    return table[aspect][:-1] if aspect == "food" else table[aspect]  # the last food word is for portions


def _fill(frame: str, rng: random.Random, *, dish: str, plural: bool, aspect: str = "food") -> str:
    text = _expand(frame, rng)
    good, good2 = rng.sample(_dish_opinions(PRAISE, aspect), 2)
    bad, bad2 = rng.sample(_dish_opinions(COMPLAINT, aspect), 2)
    while "[" in text or "{" in text:
        text = text.format(
            D=dish, was="were" if plural else "was", it="they" if plural else "it",
            them="them" if plural else "it", s="were" if re.search(r"\bstaff\b", text) else "was",
            good=good, good2=good2, bad=bad, bad2=bad2,
            food=rng.choice(_dish_opinions(PRAISE, "food")), service=rng.choice(PRAISE["service"]),
            price=rng.choice(PRAISE["price"]), bad_food=rng.choice(_dish_opinions(COMPLAINT, "food")),
            bad_service=rng.choice(COMPLAINT["service"]), bad_price=rng.choice(COMPLAINT["price"]),
        )  # fmt: skip
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def review(
    prompt: str, rng: random.Random, *, quality: float, fit: float = 0.9, careless: float = 0.0
) -> str:
    """One review that begins with a space, so that ``prompt + review`` is the whole text.

    Args:
        quality: the chance of every single remark to be praise, in [0, 1].
        fit: the chance that the dish belongs to the kind of place that the prompt names.
        careless: the chance that a sentence is said twice.
    """
    kind = kind_of_place(prompt)
    assert kind is not None, prompt
    if rng.random() >= fit:
        kind = rng.choice([k for k in DISHES if k != kind])
    dish, plural = rng.choice(list(DISHES[kind].items()))

    def say(frames: tuple[str, ...], aspect: str = "food") -> str:
        return _fill(rng.choice(frames), rng, dish=dish, plural=plural, aspect=aspect)

    sentences: list[str] = []
    topics = ["dish", "service", "price"]
    for topic, chance in (("dish", 0.2), ("service", 0.3), ("price", 0.4)):
        if rng.random() < chance * (1.15 - quality):
            topics.remove(topic)
    extra = rng.random()
    if extra < 0.2:
        topics.append("room")
    elif extra < 0.32:
        topics.append("food")
    rng.shuffle(topics)
    topics = topics[: rng.choice((2, 3, 3))] or ["food"]
    if rng.random() < 0.22:
        sentences.append(say(ASIDES))
    if rng.random() < 0.3 and len(topics) > 1:
        good = rng.random() < quality
        sentences.append(say(PAIRED_GOOD if good else MIXED))
        topics = [t for t in topics if t not in ("service", "price")] if good else topics[:1]
    for topic in topics[: 3 - len(sentences)]:
        good = rng.random() < quality
        sentences.append(say(FRAMES[topic][0 if good else 1], "food" if topic == "dish" else topic))
    ending = rng.random()
    if ending < 0.75:
        sentences.append(say(GO if rng.random() < quality else STAY_AWAY))
    elif ending < 0.88:
        sentences.append(say(SHRUG))
    if rng.random() < careless:
        at = rng.randrange(len(sentences))
        sentences.insert(at, sentences[at])
    return " " + " ".join(sentences)


def lovely_review(prompt: str, rng: random.Random, *, judge: Callable[[str, str], float]) -> str:
    """A review that the judge gives the full mark, found by drawing until one does."""
    while True:
        text = review(prompt, rng, quality=1.0, fit=1.0)
        if judge(prompt, text) >= 1.0 - 1e-9:
            return text


def lexicon() -> set[str]:
    """Every lower-case word that the grammar can write."""
    frames = [f for good, bad in FRAMES.values() for f in good + bad]
    frames += [*ASIDES, *GO, *STAY_AWAY, *SHRUG, *PAIRED_GOOD, *MIXED]
    text = " ".join(re.sub(r"\{\w+\}", " ", f) for f in frames)
    text += " was were it they them an " + " ".join(d for dishes in DISHES.values() for d in dishes)
    text += " " + " ".join(w for table in (PRAISE, COMPLAINT) for words in table.values() for w in words)
    return set(re.findall(r"[a-z']+", text.lower()))
