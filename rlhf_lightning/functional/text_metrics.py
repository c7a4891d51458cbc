"""How varied answers are, counted over their n-grams."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def distinct_n(rows: Sequence[Sequence[Hashable]], n: int) -> float:
    """Different n-grams over all n-grams of all answers together (Li et al. 2016, arXiv:1510.03055).

        distinct_n = |{g}| / sum_g count(g)

    It falls with the amount of text, so compare like amounts only.

    Args:
        rows: answers, each a sequence of words or tokens; an n-gram never spans two of them.
        n: length of an n-gram, at least 1.

    Returns:
        A share, 0 to 1; 0 where no answer is n long.

    Raises:
        ValueError: ``n`` is below 1.
    """
    grams = [gram for row in rows for gram in _grams(row, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(rows: Sequence[Sequence[Hashable]], n: int) -> float:
    """Share of an answer's n-grams that it has said before, averaged over the answers.

        rep_n = 1 - |{g}| / sum_g count(g), within one answer (Welleck et al. 2020, arXiv:1908.04319, eq. 9)

    Args:
        rows: answers, each a sequence of words or tokens; one shorter than n repeats nothing.
        n: length of an n-gram, at least 1.

    Returns:
        A share, 0 to 1; 0 without answers.

    Raises:
        ValueError: ``n`` is below 1.
    """
    grams = [_grams(row, n) for row in rows]
    shares = [1.0 - len(set(own)) / len(own) if own else 0.0 for own in grams]
    return sum(shares) / len(shares) if shares else 0.0


def _grams(row: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    if n < 1:
        raise ValueError(f"an n-gram has at least 1 part, not {n}")
    return [tuple(row[start : start + n]) for start in range(len(row) - n + 1)]
