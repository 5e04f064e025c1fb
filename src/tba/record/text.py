"""Numbers and texts as people read them.

Invariant: what a model said cannot command a terminal: control characters are shown, not sent.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from decimal import ROUND_HALF_UP, Decimal

_EXACT = 1e12  # numbers from here on are printed as they are


def duration(seconds: float) -> str:
    """Returns seconds as `42 s`, `3:05 min`, `2:07 h`."""
    rounded = max(0, round(seconds))
    if rounded < 100:
        return f"{rounded} s"
    if rounded < 100 * 60:
        return f"{rounded // 60}:{rounded % 60:02d} min"
    return f"{rounded // 3600}:{rounded % 3600 // 60:02d} h"


def hundredfold(share: float, digits: int = 1, sign: bool = False) -> str:
    """Returns 100 times a share, a half rounded away from zero: `0.60650000001` and `0.6065` -> `60.7`.

    The report page has the same rule (`tenths` of `report.js`): a figure is never two numbers. sign: with a plus.
    """
    value, sign_format = float(100 * share), "+" if sign else ""
    if not abs(value) < _EXACT:
        return f"{value:{sign_format}.{digits}f}"
    # what floats make of decimals (60.65 is 60.649999999999999 or 60.650000000000006) is not rounded, but taken back
    return f"{Decimal(repr(round(value, 9))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):{sign_format}}"


def percent(share: float, digits: int = 1) -> str:
    """Returns a share in percent: `0.4213` -> `42.1 %`."""
    return f"{hundredfold(share, digits)} %"


def plural(number: object, noun: str) -> str:
    """Returns a number with its noun, whose plural ends in s: `1 core`, `2 cores`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short_number(number: float) -> str:
    """Returns a number with three figures or four, `812`, `12.3k`, `4.56M`."""
    if abs(number) < 10_000:
        return f"{number:.0f}"
    if abs(number) < 999_950:
        return f"{number / 1e3:.1f}k"
    return f"{number / 1e6:.2f}M"


def size(number_of_bytes: float) -> str:
    """Returns a number of bytes as `412 MiB`, `1.5 GiB`."""
    mebibytes = number_of_bytes / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.1f} GiB"


def printable(text: str, longest: int = 2000, newlines: bool = True) -> str:
    """Returns `text` with control characters spelt out, cut to at most `longest` characters, then with `...`."""
    shortened = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if _harmless(c, newlines) else c.encode("unicode_escape").decode("ascii") for c in shortened)


def frame_of(texts: Iterable[str]) -> tuple[str, str]:
    """Returns how all texts begin and how they end: what a chat template writes around each question.

    The beginning goes to the end of a line or of a tag, the end begins with one. Both are empty if all texts are equal.
    """
    distinct_texts = set(texts)
    if len(distinct_texts) < 2:
        return "", ""
    beginning = _shared_beginning(distinct_texts)
    ending = _shared_beginning({text[::-1] for text in distinct_texts})[::-1]
    start = min((i for i in (ending.find("\n"), ending.find("<")) if i >= 0), default=len(ending))
    return beginning[: max(beginning.rfind("\n"), beginning.rfind(">")) + 1], ending[start:]


def _shared_beginning(texts: set[str]) -> str:
    lowest, highest = min(texts), max(texts)  # those between them in the alphabet begin like both
    shared_length = next((i for i, (a, b) in enumerate(zip(lowest, highest, strict=False)) if a != b), len(lowest))
    return lowest[:shared_length]


def strip_frame(frame: tuple[str, str], text: str) -> str:
    """Returns the text without its frame."""
    return text.removeprefix(frame[0]).removesuffix(frame[1])


def join_pairs(values: Mapping[str, object]) -> str:
    """Returns names with their values, `a 1, b 2`; `none` when there are none."""
    return ", ".join(f"{printable(str(k), 40)} {printable(str(v), 200)}" for k, v in values.items()) or "none"


def _harmless(character: str, newlines: bool) -> bool:
    return (newlines and character == "\n") or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
