"""The words that the gold rule knows: dishes by kind of place, and what praise and complaint look like."""

from __future__ import annotations

# The value says whether the dish is plural, for the grammar's agreement. No dish belongs to two kinds.
DISHES: dict[str, dict[str, bool]] = {
    "noodle bar": {
        "ramen": False, "dumplings": True, "udon": False, "noodle soup": False, "spring rolls": True,
        "fried noodles": True,
    },
    "pizzeria": {
        "margherita": False, "calzone": False, "garlic bread": False, "mushroom pizza": False,
        "tiramisu": False, "focaccia": False,
    },
    "bakery": {
        "sourdough": False, "croissants": True, "apple tart": False, "cinnamon buns": True,
        "cheesecake": False, "plum cake": False,
    },
    "fish house": {
        "grilled mackerel": False, "fish stew": False, "oysters": True, "fried cod": False, "mussels": True,
        "crab cakes": True,
    },
    "curry house": {
        "lamb curry": False, "naan": False, "samosas": True, "dal": False, "butter chicken": False,
        "vegetable curry": False,
    },
    "taco stand": {
        "fish tacos": True, "burritos": True, "churros": True, "guacamole": False, "black beans": True,
        "quesadillas": True,
    },
    "burger shop": {
        "cheeseburger": False, "fries": True, "onion rings": True, "milkshake": False, "bacon burger": False,
        "coleslaw": False,
    },
    "tea room": {
        "scones": True, "lemon cake": False, "cucumber sandwiches": True, "fruit tart": False,
        "shortbread": False, "almond biscuits": True,
    },
    "steak house": {
        "ribeye": False, "sirloin": False, "baked potatoes": True, "beef ribs": True,
        "creamed spinach": False, "pepper steak": False,
    },
    "sushi bar": {
        "tuna rolls": True, "miso soup": False, "salmon sushi": False, "tempura": False, "edamame": False,
        "grilled eel": False,
    },
    "garden cafe": {
        "lentil soup": False, "pumpkin risotto": False, "beet salad": False, "falafel": False,
        "hummus": False, "roast carrots": True,
    },
    "diner": {
        "pancakes": True, "waffles": True, "scrambled eggs": True, "hash browns": True, "porridge": False,
        "cherry pie": False,
    },
    "tapas bar": {
        "garlic prawns": True, "chorizo": False, "marinated olives": True, "cheese croquettes": True,
        "paella": False, "tortilla": False,
    },
    "ice cream parlour": {
        "vanilla sundae": False, "lemon sorbet": False, "chocolate gelato": False, "banana split": False,
        "hazelnut gelato": False, "peach sorbet": False,
    },
    "beer garden": {
        "bratwurst": False, "pretzels": True, "roast pork": False, "potato salad": False,
        "schnitzel": False, "apple strudel": False,
    },
    "kebab grill": {
        "lamb kebab": False, "flatbread": False, "grilled chicken": False, "stuffed peppers": True,
        "baklava": False, "rice pilaf": False,
    },
}  # fmt: skip

ASPECTS = ("food", "service", "price")
"""What a review can praise. The room can be complained about too, but its praise earns nothing."""

NOUNS: dict[str, str] = {
    **dict.fromkeys(("food", "dish", "dishes", "plate", "plates", "meal", "cooking", "portions"), "food"),
    **dict.fromkeys(("waiter", "waiters", "waitress", "staff"), "service"),
    **dict.fromkeys(("service", "owner", "host", "team"), "service"),
    **dict.fromkeys(("price", "prices", "bill", "cost"), "price"),
    **dict.fromkeys(("room", "tables", "chairs", "music", "floor", "windows"), "room"),
}

PRAISE: dict[str, tuple[str, ...]] = {
    "food": ("delicious", "tasty", "fresh", "lovely", "rich", "memorable", "fragrant", "superb",
             "wonderful", "excellent", "perfect", "generous"),
    "service": ("kind", "friendly", "quick", "attentive", "helpful", "cheerful", "polite", "patient",
                "charming", "wonderful", "excellent"),
    "price": ("fair", "low", "sensible", "modest", "reasonable", "honest", "decent"),
    "room": ("cosy", "bright", "quiet", "clean", "pretty", "sunny", "calm"),
}  # fmt: skip

COMPLAINT: dict[str, tuple[str, ...]] = {
    "food": ("bland", "stale", "dull", "soggy", "lifeless", "tasteless", "awful", "terrible", "dreadful",
             "watery", "forgettable", "tiny"),
    "service": ("rude", "slow", "careless", "bored", "grumpy", "forgetful", "impatient", "unfriendly",
                "awful", "terrible"),
    "price": ("high", "steep", "outrageous", "silly", "shocking", "unfair"),
    "room": ("noisy", "dirty", "cramped", "dark", "gloomy", "draughty", "smelly"),
}  # fmt: skip
# The last food words, ``generous`` and ``tiny``, suit portions and not a dish: the grammar keeps them apart.

# Whole phrases that say something by themselves: (regular expression, aspect, +1 praise or -1 complaint).
PHRASES: tuple[tuple[str, str, int], ...] = (
    (r"melted in the mouth", "food", 1),
    (r"full of flavour", "food", 1),
    (r"tasted of nothing", "food", -1),
    (r"(?:left|leave) half of (?:it|them)", "food", -1),
    (r"with a smile", "service", 1),
    (r"made us feel at home", "service", 1),
    (r"looked after us", "service", 1),
    (r"ignored us", "service", -1),
    (r"forgot (?:our|my) order", "service", -1),
    (r"waited (?:an hour|forty minutes|for ages)", "service", -1),
    (r"worth every penny", "price", 1),
    (r"(?:good|great) value", "price", 1),
    (r"a (?:real )?bargain", "price", 1),
    (r"cost a fortune", "price", -1),
    (r"(?:far )?too expensive", "price", -1),
    (r"waste of money", "price", -1),
    (r"overpriced", "price", -1),
)

WARNINGS: tuple[str, ...] = (
    r"(?:not|never|cannot|can't|won't) (?:\w+ ){0,2}(?:recommend|return|go back|come back|be back|go again)",
    r"never again",
    r"stay away",
    r"avoid (?:it|this|the)",
    r"save your money",
    r"go somewhere else",
    r"eat at home",
    r"not worth",
)
"""A last word against the place: a complaint wherever it stands."""

RECOMMENDATIONS: tuple[str, ...] = (
    r"recommend",
    r"worth (?:a visit|the trip|the walk|a detour)",
    r"(?:will|shall|would) (?:\w+ )?(?:return|go back|come back|be back|go again)",
    r"go there",
    r"(?:do not|don't) miss",
    r"you should (?:go|try|visit)",
)
"""A clear recommendation; it counts in the last sentence only, and only where no warning stands there too."""
