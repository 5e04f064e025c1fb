"""Numbers and texts as people read them.

Invariant: what a model said cannot command a terminal: control characters are shown, not sent.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping


def duration(seconds: float) -> str:
    """Returns seconds as `42 s`, `3:05 min`, `2:07 h`."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    if whole < 100 * 60:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def percent(share: float, digits: int = 1) -> str:
    """Returns a share in percent: `0.4213` -> `42.1 %`."""
    return f"{100 * share:.{digits}f} %"


def count(number: float) -> str:
    """Returns a number in short, `812`, `12.3k`, `4.56M`: three figures are enough to see how it goes."""
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
    kept = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if _harmless(c, newlines) else c.encode("unicode_escape").decode("ascii") for c in kept)


def frame_of(texts: Iterable[str]) -> tuple[str, str]:
    """Returns how all the texts begin and how they end: what a chat template writes around each question.

    The beginning goes to the end of a line or of a tag, the end begins with one; both are empty if texts are all equal.
    """
    known = set(texts)
    if len(known) < 2:
        return "", ""
    begins = _beginning(known)
    ends = _beginning({text[::-1] for text in known})[::-1]
    first = min((i for i in (ends.find("\n"), ends.find("<")) if i >= 0), default=len(ends))
    return begins[: max(begins.rfind("\n"), begins.rfind(">")) + 1], ends[first:]


def _beginning(texts: set[str]) -> str:
    first, last = min(texts), max(texts)  # those between them in the alphabet begin like both
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


def within(frame: tuple[str, str], text: str) -> str:
    """Returns the text without its frame."""
    return text.removeprefix(frame[0]).removesuffix(frame[1])


def named(values: Mapping[str, object]) -> str:
    """Returns `a 1, b 2`; `none` when there is nothing."""
    return ", ".join(f"{printable(str(k), 40)} {printable(str(v), 200)}" for k, v in values.items()) or "none"


def _harmless(character: str, newlines: bool) -> bool:
    return (newlines and character == "\n") or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
