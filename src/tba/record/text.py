"""Numbers and texts as people read them.

Invariant: what a model said cannot command a terminal: control characters are shown, not sent.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping


def duration(seconds: float) -> str:
    """`42 s`, `3:05 min`, `2:07 h`."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    if whole < 100 * 60:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def percent(share: float, digits: int = 1) -> str:
    """`0.4213` -> `42.1 %`."""
    return f"{100 * share:.{digits}f} %"


def count(number: float) -> str:
    """`812`, `12.3k`, `4.56M`: three figures are enough to see how it goes."""
    if abs(number) < 10_000:
        return f"{number:.0f}"
    if abs(number) < 999_950:
        return f"{number / 1e3:.1f}k"
    return f"{number / 1e6:.2f}M"


def size(number_of_bytes: float) -> str:
    """`412 MiB`, `1.5 GiB`."""
    mebibytes = number_of_bytes / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.1f} GiB"


def printable(text: str, longest: int = 2000, newlines: bool = True) -> str:
    """`text` with control characters spelt out, cut to at most `longest` characters; `...` says that it was cut."""
    kept = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if _harmless(c, newlines) else c.encode("unicode_escape").decode("ascii") for c in kept)


def literal(text: str, longest: int = 120) -> str:
    """`text` as a plot shows it letter by letter: between two dollars it would be a formula."""
    return printable(text, longest, newlines=False).replace("$", r"\$")


def named(values: Mapping[str, object]) -> str:
    """`a 1, b 2`; `none` when there is nothing."""
    return ", ".join(f"{printable(str(k), 40)} {printable(str(v), 200)}" for k, v in values.items()) or "none"


def _harmless(character: str, newlines: bool) -> bool:
    return (newlines and character == "\n") or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
