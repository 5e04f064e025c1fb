"""Numbers in English words: `twenty-five`, `two thirds`, `two and a half`, `third`, `3rd`.

Invariant: a text is one number or none (`two three`, `one of them` and `seven or eight` are none), read as an exact
rational in time linear in its length; what may be two numbers (`one hundredth`: 100th, or 1/100) is none.
"""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_VALUES = {word: n for n, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, 2)} | _SCALES
_ORDINALS = {"first": "one", "second": "two", "third": "three", "fifth": "five", "eighth": "eight", "ninth": "nine"}
_ORDINALS |= {"twelfth": "twelve"}
_FRACTION_WORDS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4}
_LONGEST = 100  # characters
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|mbox)\s*\{([^{}]*)\}")
_DIGIT_ORDINAL = re.compile(r"(\d{1,9})\s*\^?\s*\{?\s*(st|nd|rd|th)\s*\}?", re.IGNORECASE)
_WORDS_ONLY = re.compile(r"[a-z]+(?:[ -]+[a-z]+)*")


def ordinal(text: str) -> int | None:
    """Returns which place a text names (`3rd`, `third`, `the twenty-first`); None for anything else."""
    if len(text) > _LONGEST:
        return None
    content = _TEXT.sub(r"\1", text).strip(" .$")
    if match := _DIGIT_ORDINAL.fullmatch(content):
        n = int(match[1])
        ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
        return n if match[2].lower() == ending else None
    words = _split_words(content)
    return _ordinal_value(words[1:] if words[:1] == ["the"] else words)


def cardinal(text: str) -> Fraction | None:
    """Returns the number that a text says in words; None for anything else, digits among it."""
    words = _split_words(_TEXT.sub(r"\1", text)) if len(text) <= _LONGEST else []
    sign = -1 if words[:1] in (["minus"], ["negative"]) else 1
    words = words[1:] if sign < 0 else words
    whole_number = _whole_number(words)
    value = Fraction(whole_number) if whole_number is not None else _fraction_value(words)
    if value is None and "and" in words:  # two and a half
        and_at = len(words) - 1 - words[::-1].index("and")
        whole_part, fraction = _whole_number(words[:and_at]), _fraction_value(words[and_at + 1 :])
        value = whole_part + fraction if whole_part is not None and fraction is not None and fraction < 1 else None
    return None if value is None else sign * value


def _split_words(text: str) -> list[str]:
    content = " ".join(text.casefold().split()).strip(" .,*\"'")
    return re.split("[ -]+", content) if _WORDS_ONLY.fullmatch(content) else []


def _whole_number(words: list[str]) -> int | None:
    """Returns the whole number that is usually written in these words; None where none is."""
    if len(words) > 1 and words[0] == "a" and words[1] in _SCALES:
        words = ["one", *words[1:]]
    if any(word == "and" and (i == 0 or words[i - 1] not in _SCALES) for i, word in enumerate(words)):
        return None
    words = [word for word in words if word != "and"]
    total = group = 0
    for word in words:
        if word not in _VALUES:
            return None
        if word == "hundred":
            group *= 100
        elif word in _SCALES:
            total, group = total + group * _SCALES[word], 0
        else:
            group += _VALUES[word]
    value = total + group
    return value if words and _spell(value) == words else None


def _spell(n: int) -> list[str]:
    for scale in ("billion", "million", "thousand", "hundred"):
        if n >= (scale_value := _SCALES[scale]):
            return [*_spell(n // scale_value), scale, *(_spell(n % scale_value) if n % scale_value else [])]
    return [_ONES[n]] if n < 20 else [_TENS[n // 10 - 2], *([_ONES[n % 10]] if n % 10 else [])]


def _ordinal_value(words: list[str]) -> int | None:
    return _whole_number([*words[:-1], last_cardinal]) if words and (last_cardinal := _as_cardinal(words[-1])) else None


def _as_cardinal(word: str) -> str | None:
    """Returns the cardinal word of an ordinal one: `five` for `fifth`."""
    if word in _ORDINALS:
        return _ORDINALS[word]
    stem = f"{word[:-4]}y" if word.endswith("ieth") else word.removesuffix("th")
    return stem if stem != word and stem in _VALUES else None


def _fraction_value(words: list[str]) -> Fraction | None:
    """Returns the value of `two thirds`, `a half`, `half`."""
    if words in (["half"], ["a", "half"]):
        return Fraction(1, 2)
    if len(words) < 2 or _ordinal_value(words) is not None:
        return None
    numerator = 1 if words[:-1] == ["a"] else _whole_number(words[:-1])
    last_word = words[-1]
    denominator = _FRACTION_WORDS.get(last_word) or _VALUES.get(_as_cardinal(last_word.removesuffix("s")) or "", 0)
    is_plural = last_word.endswith("s")
    return Fraction(numerator, denominator) if numerator and denominator > 1 and is_plural == (numerator > 1) else None
