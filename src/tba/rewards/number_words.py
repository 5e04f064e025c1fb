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
_IRREGULAR = {"first": "one", "second": "two", "third": "three", "fifth": "five", "eighth": "eight", "ninth": "nine"}
_IRREGULAR |= {"twelfth": "twelve"}
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4}
_LONGEST = 100  # characters
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|mbox)\s*\{([^{}]*)\}")
_IN_DIGITS = re.compile(r"(\d{1,9})\s*\^?\s*\{?\s*(st|nd|rd|th)\s*\}?", re.IGNORECASE)
_IN_WORDS = re.compile(r"[a-z]+(?:[ -]+[a-z]+)*")


def ordinal(text: str) -> int | None:
    """Returns which place a text names (`3rd`, `third`, `the twenty-first`); None for anything else."""
    if len(text) > _LONGEST:
        return None
    plain = _TEXT.sub(r"\1", text).strip(" .$")
    if found := _IN_DIGITS.fullmatch(plain):
        n = int(found[1])
        ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
        return n if found[2].lower() == ending else None
    words = _words(plain)
    return _place(words[1:] if words[:1] == ["the"] else words)


def cardinal(text: str) -> Fraction | None:
    """Returns the number that a text says in words; None for anything else, digits among it."""
    words = _words(_TEXT.sub(r"\1", text)) if len(text) <= _LONGEST else []
    sign = -1 if words[:1] in (["minus"], ["negative"]) else 1
    words = words[1:] if sign < 0 else words
    found = _whole(words)
    value = Fraction(found) if found is not None else _fraction(words)
    if value is None and "and" in words:  # two and a half
        at = len(words) - 1 - words[::-1].index("and")
        whole, part = _whole(words[:at]), _fraction(words[at + 1 :])
        value = whole + part if whole is not None and part is not None and part < 1 else None
    return None if value is None else sign * value


def _words(text: str) -> list[str]:
    plain = " ".join(text.casefold().split()).strip(" .,*\"'")
    return re.split("[ -]+", plain) if _IN_WORDS.fullmatch(plain) else []


def _whole(words: list[str]) -> int | None:
    """Returns a whole number whose words, as they are usually said, these are."""
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
    found = total + group
    return found if words and _said(found) == words else None


def _said(n: int) -> list[str]:
    for scale in ("billion", "million", "thousand", "hundred"):
        if n >= (unit := _SCALES[scale]):
            return [*_said(n // unit), scale, *(_said(n % unit) if n % unit else [])]
    return [_ONES[n]] if n < 20 else [_TENS[n // 10 - 2], *([_ONES[n % 10]] if n % 10 else [])]


def _place(words: list[str]) -> int | None:
    return _whole([*words[:-1], last]) if words and (last := _counted(words[-1])) else None


def _counted(word: str) -> str | None:
    """Returns `five` for `fifth`."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    stem = f"{word[:-4]}y" if word.endswith("ieth") else word.removesuffix("th")
    return stem if stem != word and stem in _VALUES else None


def _fraction(words: list[str]) -> Fraction | None:
    """Returns the value of `two thirds`, `a half`, `half`."""
    if words in (["half"], ["a", "half"]):
        return Fraction(1, 2)
    if len(words) < 2 or _place(words) is not None:
        return None
    over = 1 if words[:-1] == ["a"] else _whole(words[:-1])
    last = words[-1]
    under = _PARTS.get(last) or _VALUES.get(_counted(last.removesuffix("s")) or "", 0)
    plural = last.endswith("s")
    return Fraction(over, under) if over and under > 1 and plural == (over > 1) else None
