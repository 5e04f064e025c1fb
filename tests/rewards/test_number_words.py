"""Numbers in English words: each is said in one way, and what is no number, or two, is none."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tba.rewards.exact_answer import grade
from tba.rewards.number_words import cardinal, ordinal

SAID = {
    "zero": 0,
    "seven": 7,
    "Twelve.": 12,
    "twenty-five": 25,
    "ninety nine": 99,
    "a hundred": 100,
    "one hundred and one": 101,
    "three thousand two hundred": 3200,
    "two million, ": 2 * 10**6,
    "minus three": -3,
    "half": Fraction(1, 2),
    "one half": Fraction(1, 2),
    "a quarter": Fraction(1, 4),
    "two thirds": Fraction(2, 3),
    "two and a half": Fraction(5, 2),
    "negative one third": Fraction(-1, 3),
    r"\text{seventeen}": 17,
}
NONE = (
    *("", "7", "two three", "two and three", "seven or eight", "one of them", "twenty twelve", "five twenty"),
    *("and two", "hundred", "third", "one hundredth", "two third", "one thirds", "a dozen", "twenty and five"),
    *("ten " * 40, "oneself", "two and two", "x"),
)


PLACES = {
    "3rd": 3,
    "third": 3,
    "the Third": 3,
    r"3^{\text{rd}}": 3,
    r"3\text{rd}": 3,
    "21st": 21,
    "twenty-first": 21,
    "12th": 12,
    "twelfth": 12,
    "twentieth": 20,
    "one hundredth": 100,
    **dict.fromkeys(("3", "three", "3th", "11st", "thirds", "truth")),
}


def test_a_number_in_words_is_its_value_and_what_is_none_or_more_than_one_is_none() -> None:
    assert {text: cardinal(text) for text in SAID} == SAID
    assert {text: cardinal(text) for text in NONE} == dict.fromkeys(NONE)


def test_a_place_is_the_same_in_digits_and_in_words() -> None:
    assert {text: ordinal(text) for text in PLACES} == PLACES


ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_numbers_below_a_thousand_are_read_as_they_are_said(a: int, b: int, c: int) -> None:
    tens = {2: "twenty", 3: "thirty", 4: "forty", 5: "fifty", 6: "sixty", 7: "seventy", 8: "eighty", 9: "ninety"}
    if b == 1:
        return
    text = f"{ONES[a - 1]} hundred and {tens[b]}-{ONES[c - 1]}"
    value = 100 * a + 10 * b + c
    assert cardinal(text) == value
    assert grade(f"The answer is {text}.", str(value))
    assert not grade(f"The answer is {text}.", str(value + 1))
    assert grade(f"#### {value}", text)
