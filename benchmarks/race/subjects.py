"""What both sides are asked; the peer's environment imports it too."""

SUBJECTS = (
    "a film",
    "a book",
    "a dog",
    "a small cafe",
    "the new phone",
    "a train ride",
    "my garden",
    "an old song",
)


def questions(count: int) -> list[str]:
    """One user message a prompt, the subjects in turn."""
    return [f"Write a short review of {SUBJECTS[i % len(SUBJECTS)]}." for i in range(count)]
