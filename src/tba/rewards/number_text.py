r"""Numbers as people and models write them, read as exact rationals.

Invariant: a value is a `Fraction`, never a float, and any text is read in time linear in its length (every repetition
below is possessive, alone in an atomic group, or bounded).

One number: `1,234` `5 000` `-5` `−5` `$5.00` `-$5` `50%` `5 km` `12apples` `72.` `007` `.5` `1.5e3` `2.5 million`
`3 \times 10^5` `10^6` `1/2` `½` `\frac{1}{2}` `1 1/2`, also in wide digits and those of other scripts. No number: a
date (`2024-01-15`, `1/2/2024`), a time of day or a ratio (`5:30`, `2 : 3`), a version (`1.2.3`), digits attached to a
preceding letter (`B2`, `v3`), a power (`2^10`), an exponent (the 2 of `cm^2`). A hyphen after a number is not a sign.
Groups of digits with spaces between them are one number if a group begins with 0 (`5 000`, `1 234 050`), since no
number does, or if there are three of them (`1 234 567`); `12 345` may be a list and is read as two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from tba.rewards.unicode_text import FRACTIONS, WIDE, with_powers
from tba.rewards.units import CURRENCIES, unit_after

MAX_DIGITS = 1000  # a longer number or a larger exponent has no value: exact arithmetic stays cheap

_NUMBER = re.compile(
    r"""(?P<date> [0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?![0-9]) )
      | (?P<glued> (?<=[A-Za-z])[0-9][0-9A-Za-z]*+(?>(?:\.[0-9]++)*) )
      | (?P<exponent> \^\{?\s?[-+]?[0-9]++ )
      | (?P<ratio> [0-9]++(?>(?:\.[0-9]++)?)(?>(?::[0-9]++|[ ]:[ ][0-9]++)+) )
      | (?P<sign> (?<![A-Za-z0-9)\]}%-])[-+] )?
        (?>(?: (?P<whole>[0-9]{1,9})[ ](?=[0-9]{1,9}/[0-9]) )?)
        (?P<digits> [0-9]++(?>(?:,[0-9]++)*)(?>(?:\.[0-9]++)*) | (?<![A-Za-z0-9.])\.[0-9]++ )
        (?>(?: [eE](?P<e>[-+]?[0-9]++)(?![A-Za-z]) )?)
        (?>(?: [ ]?[x*\u00d7\u00b7][ ]?10\^\{?(?P<ten>[-+]?[0-9]++) )?)
        (?P<over> (?>(?:[ ]?/[ ]?[0-9]++(?>(?:,[0-9]{3})*)(?>(?:\.[0-9]++)?))*) )
        (?>(?: \^\{?\s?(?P<raised>[-+]?[0-9]++) )?)
        (?>(?: [ {}-]{0,4}(?P<scale>[hH]undred|[tT]housand|[mMbBtT]illion)s?(?![A-Za-z]) )?)""",
    re.VERBOSE,
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GROUPED_DIGITS = re.compile(r"[1-9][0-9]{0,2}(?>(?:,[0-9]{3})+)(?:\.[0-9]++)?")
_FRACTION = re.compile(r"\\[cdt]?frac\s?(?:\{([^{}]{1,99})\}\s?\{([^{}]{1,99})\}|([0-9])\s?([0-9]))")
_GROUP_SPACE = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|,\\!|\{,\}|[\u00a0\u2009\u202f'_])(?=[0-9]{3}(?![0-9]))")
_SPACED_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?>(?: [0-9]{3}(?![0-9]))+)(?! ?/)")
_THIN_SPACE = re.compile(r"\\[,;:> ]")
_MACRO = re.compile(r"\\[A-Za-z]++")
_CURRENCY = re.compile(
    r"(?P<signed>(?<=[-+])[ ]?)?(?P<sign>\\?[$€£¥₹])[ ]?(?P<amount>(?=[0-9][0-9.,]*+(?![ ]?[$\\^+*/=-])))?"
)
_DETACHED_SIGN = re.compile(r"(?:^|(?<=[=:({$])|(?<=\bis ))[ \t$]*+([-+])(?:\*\*[ \t{($]*+|[ \t{($]++)(?=[0-9.])")
_SYMBOLS = {
    r"\times": "\u00d7",
    r"\cdot": "\u00b7",
    r"\sqrt": "√",
    r"\pi": "π",
    r"\circ": "°",
    r"\degree": "°",
    r"\Omega": "Ω",
    r"\mu": "µ",
    r"\pounds": "£",
    r"\euro": "€",
    r"\yen": "¥",
    r"\colon": ":",
    r"\pm": "±",
    r"\mp": "±",
    r"\lt": "<",
    r"\gt": ">",
    r"\ne": "≠",
    r"\neq": "≠",
    r"\mid": "|",
    r"\lvert": "|",
    r"\rvert": "|",
    **dict.fromkeys((r"\le", r"\leq", r"\leqslant"), "≤"),
    **dict.fromkeys((r"\ge", r"\geq", r"\geqslant"), "≥"),
    **dict.fromkeys((r"\to", r"\rightarrow", r"\Rightarrow", r"\implies", r"\therefore", r"\approx"), " "),
    **dict.fromkeys(
        (r"\text", r"\textbf", r"\textit", r"\textrm", r"\textnormal", r"\mbox", r"\mathrm", r"\mathbf"), " "
    ),
    **dict.fromkeys((r"\mathit", r"\mathsf", r"\operatorname", r"\boxed", r"\fbox", r"\left", r"\right", r"\big"), " "),
    **dict.fromkeys((r"\displaystyle", r"\textstyle", r"\quad", r"\qquad", r"\thinspace", r"\newline", r"\bf"), " "),
}
UNKNOWN = "¤"  # stands for a LaTeX command that says more than how a number looks (`\ln`, `\infty`)
_ASCII_SIGNS = str.maketrans(
    WIDE
    | {ord(sign): f" {value}" for sign, value in FRACTIONS.items()}
    | {ord("\u2044"): "/", ord("\u03bc"): "µ", ord("\u2126"): "Ω"}
)
_BEFORE_QUANTITY = re.compile(r"[\s({\[*'\"`~≈$€£¥₹]*+")
_ONE_LETTER = re.compile(r"[A-Za-z](?![A-Za-z/])")
_WORD = re.compile(r"[A-Za-z]++")
_GAP = re.compile(r"(?>(?:[\s.(){}\]*'\"`_$?;,]++)?)(?>(?:\^\{?[23](?![0-9]))?)(?>(?:-(?=[A-Za-z]{3}))?)")
_SHORT_WORDS = frozenset(["of", "in", "to", "at", "on", "by", "for", "the", "per", "all", "any", "men", "new", "old"])
_LETTER = re.compile(r"[A-Za-z]")
_VOWEL = re.compile(r"[aeiouyAEIOUY]")


def to_plain_text(text: str) -> str:
    """Returns a text with LaTeX, currency signs and typographic minus signs reduced to what `numbers` reads.

    Of currency signs `\\$`, `€`, `£`, `¥` and `₹` are left, `\\$` as `$`; a bare `$` only before a number that no other
    `$` or operation follows, since it may begin or end mathematics. A command that is not known becomes `UNKNOWN`.
    """
    if not text.isascii():
        text = with_powers(text).translate(_ASCII_SIGNS)
    text = _FRACTION.sub(_inline_fraction, text)
    text = _GROUP_SPACE.sub(",", text).replace("\\!", "")
    text = _SPACED_GROUPS.sub(lambda m: m[0].replace(" ", ",") if " 0" in m[0] or m[0].count(" ") > 1 else m[0], text)
    text = _THIN_SPACE.sub(" ", text).replace("\\%", "%")
    text = _MACRO.sub(lambda m: _SYMBOLS.get(m[0], UNKNOWN), text)
    text = _CURRENCY.sub(_replace_currency, text)
    return _DETACHED_SIGN.sub(r"\1", text)


def _replace_currency(match: re.Match[str]) -> str:
    if match["signed"] is not None:
        return ""
    return " " if match["sign"] == "$" and match["amount"] is None else match["sign"].lstrip("\\")


def numbers(text: str) -> Iterator[Fraction | None]:
    """Yields every number of a plain text, in order; None for one without a value (too long, or divided by zero)."""
    for match in _NUMBER.finditer(text):
        yield from _values_of(match)


class Quantity(NamedTuple):
    """A number in a text, the unit after it or the currency before it (see `units`; None: neither), and where it is."""

    value: Fraction | None
    unit: str | None
    start: int
    end: int


def amounts(text: str) -> Iterator[Quantity]:
    """Yields the same as `numbers`, with units. In a list such as `1,2,3 cm` only the last has one."""
    for match in _NUMBER.finditer(text):
        values = _values_of(match)
        unit, end = unit_after(text, match.end())
        sign = text[max(0, match.start() - 1) : match.start()]
        if unit is None and sign in CURRENCIES:
            unit = sign
        for value in values[:-1]:
            yield Quantity(value, None, match.start(), match.end())
        for value in values[-1:]:
            yield Quantity(value, unit, match.start(), end)


def quantity(text: str) -> Quantity | None:
    """Returns the amount that a plain text is, perhaps with words (`12 apples`, `50%`); None for all other text.

    None also for what has a number in it and is none: `3!`, `2x`, `(5, ∞)`, `8-i`, `2 \\sec x`.
    """
    match = _NUMBER.search(text)
    if match is None or not _BEFORE_QUANTITY.fullmatch(text[: match.start()]):
        return None
    values = _values_of(match)
    if len(values) != 1 or ("," in match[0] and text[: match.start()].rstrip().endswith(("(", "[", "{"))):
        return None  # (100,101) is a point
    unit, end = unit_after(text, match.end())
    if unit is None and (currency := text[max(0, match.start() - 1) : match.start()]) in CURRENCIES:
        unit = currency
    if unit is not None and _ONE_LETTER.match(text, match.end()):
        return None  # 2s
    return Quantity(values[0], unit, match.start(), end) if _only_words(text, end, match.end() == end) else None


def _only_words(text: str, position: int, after_number: bool) -> bool:
    """Returns whether nothing but words and punctuation follows: no variable, no operation, no further number."""
    if text[position : position + 1] == "!":
        return False
    while position < len(text):
        if gap := _GAP.match(text, position):
            after_number &= gap.end() == position
            position = gap.end()
        if position == len(text):
            return True
        word = _WORD.match(text, position)
        if word is None or not _is_word(word[0], after_number):
            return False
        position, after_number = word.end(), False
    return True


def _is_word(word: str, follows_digit: bool) -> bool:
    """Returns whether letters are a word rather than variables; `follows_digit`: right after a digit, as in `3xy`."""
    if len(word) > 3:
        return _VOWEL.search(word) is not None
    if follows_digit or len(word) < 3:
        return not follows_digit and word.lower() in _SHORT_WORDS
    steps = [ord(b) - ord(a) for a, b in pairwise(word)]
    return word.isupper() or (_VOWEL.search(word) is not None and steps != [1, 1])


def _inline_fraction(match: re.Match[str]) -> str:
    numerator, denominator = (match[1], match[2]) if match[1] else (match[3], match[4])
    if denominator.startswith("-"):
        numerator, denominator = numerator[1:] if numerator.startswith("-") else f"-{numerator}", denominator[1:]
    follows_digit = match.start() > 0 and match.string[match.start() - 1].isdigit()  # 1\frac{1}{2}: a mixed number
    if _LETTER.search(numerator + denominator):
        numerator, denominator = f"({numerator})", f"({denominator})"  # 1/(4m) is no quarter of a meter
    return f"{' ' if follows_digit else ''}{numerator}/{denominator}"


def _values_of(match: re.Match[str]) -> list[Fraction | None]:
    """Returns the numbers of one match: none for a date or the like, several for a list such as `1,2,3`."""
    digits, denominator = match["digits"], match["over"]
    if digits is None or digits.count(".") > 1 or denominator.count("/") > 1:
        return []
    if match["raised"] is not None:
        return [_power_of_ten(match["raised"])] if digits == "10" and not denominator else []
    groups = [digits] if _GROUPED_DIGITS.fullmatch(digits) else digits.split(",")
    *leading_values, last_value = (_parse_decimal(d) for d in groups)
    if last_value is not None:
        last_value = _scale(last_value, match["e"], match["ten"])
    if last_value is not None and denominator:
        last_value = _divide(last_value, denominator, match["whole"])
    if last_value is not None and match["scale"] is not None:
        last_value *= _SCALES[match["scale"].lower()]
    values = [*leading_values, last_value]
    if match["sign"] == "-" and values[0] is not None:
        values[0] = -values[0]
    return values


def _parse_decimal(digits: str) -> Fraction | None:
    return Fraction(digits.replace(",", "")) if len(digits) <= MAX_DIGITS else None


def _power_of_ten(exponent: str) -> Fraction | None:
    if len(exponent) > MAX_DIGITS or abs(int(exponent)) > MAX_DIGITS:
        return None
    return Fraction(10) ** int(exponent)


def _scale(value: Fraction, *exponents: str | None) -> Fraction | None:
    for exponent in exponents:
        if exponent is not None:
            factor = _power_of_ten(exponent)
            if factor is None:
                return None
            value *= factor
    return value


def _divide(numerator: Fraction, denominator_text: str, whole_part: str | None) -> Fraction | None:
    denominator = _parse_decimal(denominator_text.strip(" /"))
    if not denominator:
        return None
    return numerator / denominator + (int(whole_part) if whole_part is not None and numerator < denominator else 0)
