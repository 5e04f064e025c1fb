r"""Numbers as people and models write them, read as exact rationals.

Invariant: a value is a `Fraction`, never a float, and any text is read in time linear in its length (every repetition
below is possessive, alone in an atomic group, or bounded).

One number: `1,234` `5 000` `-5` `−5` `$5.00` `-$5` `50%` `5 km` `12apples` `72.` `007` `.5` `1.5e3`
`3 \times 10^5` `10^6` `1/2` `\frac{1}{2}` `1 1/2`. No number: a date (`2024-01-15`, `1/2/2024`), a version (`1.2.3`),
digits attached to a preceding letter (`B2`, `v3`), a power (`2^10`), an exponent (the 2 of `cm^2`). A hyphen after a
number is not a sign. Groups of digits with spaces between them are one number if a group begins with 0 (`5 000`,
`1 234 050`), since no number does; `12 345` may be a list and is read as two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from tba.rewards.units import CURRENCIES, unit_after

MAX_DIGITS = 1000  # a longer number or a larger exponent has no value: exact arithmetic stays cheap

_NUMBER = re.compile(
    r"""(?P<date> [0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?![0-9]) )
      | (?P<glued> (?<=[A-Za-z])[0-9][0-9A-Za-z]*+(?>(?:\.[0-9]++)*) )
      | (?P<exponent> \^\{?\s?[-+]?[0-9]++ )
      | (?P<sign> (?<![A-Za-z0-9)\]}%-])[-+] )?
        (?>(?: (?P<whole>[0-9]{1,9})[ ](?=[0-9]{1,9}/[0-9]) )?)
        (?P<digits> [0-9]++(?>(?:,[0-9]++)*)(?>(?:\.[0-9]++)*) | (?<![A-Za-z0-9.])\.[0-9]++ )
        (?>(?: [eE](?P<e>[-+]?[0-9]++)(?![A-Za-z]) )?)
        (?>(?: [ ]?[x*\u00d7\u00b7][ ]?10\^\{?(?P<ten>[-+]?[0-9]++) )?)
        (?P<over> (?>(?:[ ]?/[ ]?[0-9]++(?>(?:,[0-9]{3})*)(?>(?:\.[0-9]++)?))*) )
        (?>(?: \^\{?\s?(?P<raised>[-+]?[0-9]++) )?)""",
    re.VERBOSE,
)
_GROUPED = re.compile(r"[0-9]{1,3}(?>(?:,[0-9]{3})+)(?:\.[0-9]++)?")
_FRACTION = re.compile(r"\\[cdt]?frac\s?(?:\{([^{}]{1,99})\}\s?\{([^{}]{1,99})\}|([0-9])([0-9]))")
_GROUP_SPACE = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|\{,\}|[\u00a0\u2009\u202f'_])(?=[0-9]{3}(?![0-9]))")
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?>(?: [0-9]{3}(?![0-9]))+)(?! ?/)")
_MACRO = re.compile(r"\\[A-Za-z]++")
_CURRENCY = re.compile(r"(?P<signed>(?<=[-+])[ ]?)?(?P<sign>\\?[$€£¥₹])[ ]?")
_KEPT = {"\\$": "$", "€": "€"}
_DETACHED_SIGN = re.compile(r"(?:^|(?<=[=:(]))[ \t]*+([-+])[ \t]++(?=[0-9.])")
_SYMBOLS = {r"\times": "*", r"\cdot": "*", r"\sqrt": "√", r"\pi": "π", r"\circ": "°", r"\degree": "°", r"\Omega": "Ω"}
_PLAIN = str.maketrans(
    dict.fromkeys("\u2212\u2012\u2013\ufe63\uff0d", "-")  # minus sign, figure dash, en dash, small and wide hyphen
    | dict.fromkeys("\u00ad\u200b\u2060\ufeff", "")  # invisible: soft hyphen, zero-width space, joiner, byte order mark
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4"}
)
_BEFORE_QUANTITY = re.compile(r"[\s({\[*'\"`~$€]*+")
_AFTER_QUANTITY = re.compile(r"(?![A-Za-z](?![A-Za-z]))(?!.*\s-\s)[^0-9=+*<>^√π]*+(?>(?:\^\{?[23])?)[\s.)\]}*]*+")


def plain(text: str) -> str:
    """`text` with LaTeX, currency signs and typographic minus signs reduced to what `numbers` reads.

    Of currency signs `\\$` is left, as `$`, and the euro; a bare `$` may begin or end mathematics.
    """
    text = text.translate(_PLAIN)
    text = _FRACTION.sub(_inline_fraction, text)
    text = _GROUP_SPACE.sub(",", text).replace("\\!", "")
    text = _SPACED.sub(lambda m: m[0].replace(" ", ",") if " 0" in m[0] else m[0], text)
    text = _MACRO.sub(lambda m: _SYMBOLS.get(m[0], " "), text)
    text = _CURRENCY.sub(lambda m: "" if m["signed"] is not None else _KEPT.get(m["sign"], " "), text)
    return _DETACHED_SIGN.sub(r"\1", text)


def numbers(text: str) -> Iterator[Fraction | None]:
    """Yields every number of a plain text, in order; None for one without a value (too long, or divided by zero)."""
    for match in _NUMBER.finditer(text):
        yield from _values(match)


class Amount(NamedTuple):
    """A number in a text, the unit after it or the currency before it (see `units`; None: neither), and where it is."""

    value: Fraction | None
    unit: str | None
    start: int
    end: int


def amounts(text: str) -> Iterator[Amount]:
    """Yields the same as `numbers`, with units. In a list such as `1,2,3 cm` only the last has one."""
    for match in _NUMBER.finditer(text):
        values = _values(match)
        unit, end = unit_after(text, match.end())
        before = text[max(0, match.start() - 1) : match.start()]
        if unit is None and before in CURRENCIES:
            unit = before
        for value in values[:-1]:
            yield Amount(value, None, match.start(), match.end())
        for value in values[-1:]:
            yield Amount(value, unit, match.start(), end)


def quantity(text: str) -> Fraction | None:
    """Returns the value of a text that is one number, perhaps with a unit (`12 apples`, `50%`); else None."""
    match = _NUMBER.search(text)
    if match is None or not _BEFORE_QUANTITY.fullmatch(text[: match.start()]):
        return None
    values = _values(match)
    return values[0] if len(values) == 1 and _AFTER_QUANTITY.fullmatch(text[match.end() :]) else None


def _inline_fraction(match: re.Match[str]) -> str:
    top, bottom = (match[1], match[2]) if match[1] else (match[3], match[4])
    after_digit = match.start() > 0 and match.string[match.start() - 1].isdigit()  # 1\frac{1}{2}: a mixed number
    return f"{' ' if after_digit else ''}{top}/{bottom}"


def _values(match: re.Match[str]) -> list[Fraction | None]:
    """Returns the numbers of one match: none for a date or the like, several for a list such as `1,2,3`."""
    digits, over = match["digits"], match["over"]
    if digits is None or digits.count(".") > 1 or over.count("/") > 1:
        return []
    if match["raised"] is not None:
        return [_power_of_ten(match["raised"])] if digits == "10" and not over else []
    listed = [digits] if _GROUPED.fullmatch(digits) else digits.split(",")
    *before, last = (_decimal(d) for d in listed)
    if last is not None:
        last = _scaled(last, match["e"], match["ten"])
    if last is not None and over:
        last = _divided(last, over, match["whole"])
    values = [*before, last]
    if match["sign"] == "-" and values[0] is not None:
        values[0] = -values[0]
    return values


def _decimal(digits: str) -> Fraction | None:
    return Fraction(digits.replace(",", "")) if len(digits) <= MAX_DIGITS else None


def _power_of_ten(exponent: str) -> Fraction | None:
    if len(exponent) > MAX_DIGITS or abs(int(exponent)) > MAX_DIGITS:
        return None
    return Fraction(10) ** int(exponent)


def _scaled(value: Fraction, *exponents: str | None) -> Fraction | None:
    for exponent in exponents:
        if exponent is not None:
            factor = _power_of_ten(exponent)
            if factor is None:
                return None
            value *= factor
    return value


def _divided(top: Fraction, over: str, whole: str | None) -> Fraction | None:
    bottom = _decimal(over.strip(" /"))
    if not bottom:
        return None
    proper = top < bottom
    return top / bottom + (int(whole) if whole is not None and proper else 0)
