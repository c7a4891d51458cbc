"""Every number from user code is checked before it trains anything (fault 36); texts forge no output."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import WrongCount, checked, shown

PROMPTS = ["first", "second", "third"]
RESPONSES = ["one", "two", "three"]


def check(values: object, responses: list[str] = RESPONSES) -> torch.Tensor:
    return checked(values, name="reward.function=m:f", prompts=PROMPTS[: len(responses)], responses=responses)


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5, -2],
        (1.0, 0.5, -2.0),
        np.array([1.0, 0.5, -2.0]),
        np.array([1.0, 0.5, -2.0], dtype=np.float16),
        torch.tensor([1.0, 0.5, -2.0]),
        torch.tensor([1.0, 0.5, -2.0], dtype=torch.bfloat16, requires_grad=True),
        [np.float32(1), np.float64(0.5), np.int64(-2)],
        [torch.tensor(1.0, requires_grad=True), torch.tensor(0.5), np.array(-2)],
        [True, Fraction(1, 2), Decimal(-2)],
    ],
)
def test_numbers_of_every_make_are_taken(values: object) -> None:
    scores = check(values)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    assert scores.tolist() == [1.0, 0.5, -2.0]


def test_true_and_false_are_one_and_zero() -> None:
    assert check([True, np.bool_(False), torch.tensor(True)]).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "must be finite, got nan"),
        (np.float32("inf"), "must be finite, got inf"),
        (torch.tensor(float("-inf")), "must be finite, got -inf"),
        ("0.5", "must be a number, got '0.5' of type str"),
        (None, "must be a number, got None of type NoneType"),
        ([1.0], "must be a number, got [1.0] of type list"),
        (torch.tensor([1.0]), "must be a number"),
        (1j, "must be a number, got 1j of type complex"),
        (1e300, "must fit float32, got 1e+300"),
        (10**400, "must be finite"),
    ],
)
def test_the_row_of_a_bad_value_is_shown(value: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check([0.0, value, 0.0])
    message = str(caught.value)
    assert said in message
    assert "reward.function=m:f" in message and "row 1 (prompt 'second', response 'two')" in message


def test_a_nan_inside_a_tensor_or_array_is_found() -> None:
    for values in (torch.tensor([1.0, 2.0, float("nan")]), np.array([1.0, 2.0, np.nan])):
        with pytest.raises(
            UserError, match=r"row 2 \(prompt 'third', response 'three'\) must be finite, got nan"
        ):
            check(values)


@pytest.mark.parametrize("values", [[1.0, 2.0], torch.zeros(2), np.zeros(2)])
def test_too_few_names_the_first_row_without_a_score(values: object) -> None:
    with pytest.raises(WrongCount, match=r"2 scores for 3 responses; nothing for row 2 \(prompt 'third'"):
        check(values)


def test_too_many_shows_the_first_score_left_over() -> None:
    with pytest.raises(WrongCount, match=r"4 scores for 3 responses; 9\.5 came after that of row 2"):
        check([1.0, 2.0, 3.0, 9.5])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.zeros(3, 1), r"shape \(3, 1\)"),
        (np.zeros((1, 3)), r"shape \(1, 3\)"),
        (torch.tensor(1.0), r"shape \(\)"),
        (None, "got None of type NoneType"),
        (1.0, "got 1.0 of type float"),
        ("123", "got '123' of type str"),
        ({"a": 1.0}, "of type dict"),
        ((x for x in (1.0, 2.0, 3.0)), "of type generator"),
    ],
)
def test_what_is_no_flat_list_is_refused(values: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(values)


def test_no_responses_no_scores() -> None:
    assert check([], responses=[]).shape == (0,)
    with pytest.raises(WrongCount, match="1 scores for 0 responses"):
        check([1.0], responses=[])


def test_model_text_cannot_forge_terminal_output() -> None:
    evil = "ok\x1b[2J\rrun finished\n\u202egnp.exe\x07"
    with pytest.raises(UserError) as caught:
        checked([evil], name="r", prompts=[evil], responses=[evil])
    message = str(caught.value)
    assert message.isprintable()
    assert r"\x1b[2J\rrun finished\n\u202egnp" in message


def test_a_value_with_a_hostile_repr_is_escaped_too() -> None:
    class Evil:
        def __repr__(self) -> str:
            return "\x1b]0;title\x07" * 50

    with pytest.raises(UserError) as caught:
        check([0.0, Evil(), 0.0])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_long_texts_keep_both_ends_and_other_scripts_stay_readable() -> None:
    short = shown("a" * 300 + "日本 🙂", limit=80)
    assert short.startswith("'aaa") and short.endswith("日本 🙂'") and "..." in short
    assert len(short) == 85  # 80 characters, three dots, two quotes
