"""The prompts: kind of place x setting x mood x form; some pairs of kind and setting never enter training."""

from __future__ import annotations

import random

from rlhf_lightning.assets.lexicon import DISHES

SETTINGS = (
    "by the harbour", "near the station", "on the market square", "behind the old church",
    "at the edge of the park", "on Mill Street", "across from the library", "under the railway bridge",
    "next to the theatre", "on the hill", "by the canal", "in the old town", "beside the bus stop",
    "at the airport", "near the university", "down by the river",
)  # fmt: skip
MOODS = (
    "after a long walk", "on a rainy evening", "on a busy Saturday", "with my parents",
    "with two tired children", "late at night", "on a quiet Monday", "for my birthday", "after work",
    "before the film", "with old friends", "on our first day in town", "on a cold morning",
    "in the middle of summer",
)  # fmt: skip
FORMS = (
    "Review of the {place}:",
    "My review of the {place}:",
    "Our visit to the {place}:",
    "What we thought of the {place}:",
    "A few words about the {place}:",
    "Lunch at the {place}:",
    "An evening at the {place}:",
    "Notes on the {place}:",
)
HELDOUT_SHARE = 0.2


def heldout_places(seed: int) -> set[tuple[str, str]]:
    """The pairs (kind, setting) that no training text may name: a fifth of them, every kind among them."""
    rng = random.Random(f"{seed}/places")
    count = round(HELDOUT_SHARE * len(SETTINGS))
    return {(kind, setting) for kind in DISHES for setting in rng.sample(SETTINGS, count)}


def make_prompt(kind: str, setting: str, rng: random.Random) -> str:
    mood = f" {rng.choice(MOODS)}" if rng.random() < 0.35 else ""
    return rng.choice(FORMS).format(place=f"{kind} {setting}{mood}")


def sample_prompt(rng: random.Random, *, heldout: bool, kept_out: set[tuple[str, str]]) -> str:
    """One prompt from the training places, or from the held-out ones."""
    while True:
        kind, setting = rng.choice(tuple(DISHES)), rng.choice(SETTINGS)
        if ((kind, setting) in kept_out) == heldout:
            return make_prompt(kind, setting, rng)


def distinct_prompts(
    count: int, rng: random.Random, *, heldout: bool, kept_out: set[tuple[str, str]]
) -> list[str]:
    """``count`` different prompts, in the order drawn."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[sample_prompt(rng, heldout=heldout, kept_out=kept_out)] = None
    return list(found)
