r"""Answers to MATH-style problems as text: where a response gives one, and one canonical spelling for equal answers.

Invariant: two answers with the same `canonical` spelling are mathematically equal; equalities that need algebra (1/2
and 0.5, (x+1)^2 and x^2+2x+1, {1,2} and {2,1}) are left to `math_answer`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from tba.rewards.number_text import Amount, amounts, numbers, plain
from tba.rewards.units import LETTERS, differ

_BOX = re.compile(r"\\(?:f?boxed|fbox)(?![A-Za-z])( *+)")
_UNBRACED = re.compile(r"\s*+([^\s$]*[^\s$.,])")
_NUMERAL = re.compile(r"[-+]?[0-9][0-9,]*+(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]{1,4})?")
_LONE = re.compile(r"(?<![A-Za-z])(?![AaPp]\.[Mm](?![A-Za-z]))(?<![AaPp]\.)[A-Za-z](?![A-Za-z])")  # but of `p.m.`
_BEFORE_AMOUNT = re.compile(r"[\s$€({]*+")
_AFTER_AMOUNT = re.compile(r"[\s.)}]*+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one does not count
_EMPHASIS = re.compile(r"\s*+(\*{1,3})([^*]+)\1\s*")  # **5** of Markdown
_SPACES = re.compile(r"(?>(?:(?<!\\)\\[,;:!> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z])|\s)+)")
_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|mathstrut|limits)(?![A-Za-z])"
    r"|(?<!\\)\\[()\[\]]|(?<!\\)\$|\^\s*+\{?+\s*+\\circ\s*+\}?|\\degree(?![A-Za-z])|°"
)
_SKIP = re.compile(r"\\\\\s*\[[^\[\]]{1,12}\]")  # \\[4pt]
_FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])")
_ARGUMENT = re.compile(r" *+(\{|\\[A-Za-z]++|[0-9A-Za-z])")
_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"[A-Za-z]")
_MATRIX = re.compile(r"\{[bvBV]matrix\}|\{smallmatrix\}")
_SUBSCRIPT = re.compile(r"_\{\s*([0-9A-Za-z])\s*\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|\\ |,\\!)(?=\d{3}(?!\d))")
_REPEATING = re.compile(r"(-?)(?<!\d)(\d*+)\.(\d*+)\\overline\s*+\{(\d++)\}")
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_BASE = re.compile(r"-?([0-9A-F.]+)_\{?(\d+)\}?")
_WORDS = re.compile(r"[a-z][a-z'-]*(?:[ ,:]+(?:[a-z][a-z'-]*|\d{1,4}))*")
_SAME = (  # commands of one meaning
    (re.compile(r"\\leq?slant(?![A-Za-z])|\\leq(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\geq?slant(?![A-Za-z])|\\geq(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\infin(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\+\s*\\infty"), r"\\infty"),
)
_AROUND = re.compile(r" ?([^\w\s\\]) ?| +(?=\\)|(\\[A-Za-z]+|\\\\) +(?![A-Za-z])")  # where a space says nothing
_LEADING = re.compile(r"^(?>(?:\\approx(?![A-Za-z])|[= ])+)")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 7`); None without a complete one."""
    found, closing = None, _closings(text)
    for match in _BOX.finditer(text):
        at = match.end(1)
        if text[at : at + 1] == "{":
            found = (at + 1, closing[at]) if at in closing else found
        elif match[1] and (bare := _UNBRACED.match(text, at)):
            found = bare.span(1)
    return text[slice(*found)] if found else None


def canonical(answer: str) -> str:
    """Returns one spelling for answers that differ only in spacing, in the size of brackets and fractions, etc."""
    emphasised = _EMPHASIS.fullmatch(answer)
    text = _SKIP.sub(r"\\\\ ", emphasised[2] if emphasised else answer)
    text = _THOUSANDS.sub("", text)
    text = _DROPPED.sub("", text)
    for pattern, spelling in _SAME:
        text = pattern.sub(spelling, text)
    text = _TEXT.sub(lambda m: f"\\text{{{m[1].strip()}}}" if _LETTER.search(m[1]) else m[1], text)
    text = _MATRIX.sub("{pmatrix}", text)
    text = _REPEATING.sub(_fraction_of, text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _fractions(text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _SUBSCRIPT.sub(r"_\1", text)
    text = _LEADING.sub("", _SPACES.sub(" ", text).strip()).rstrip(" .,;")
    whole = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    text = whole[1].strip() if whole else text
    if text.startswith("."):
        text = f"0{text}"
    return _AROUND.sub(r"\1\2", text)


def words(answer: str) -> str | None:
    """Returns one spelling of an answer in words (`June 20`, `no solution`, `(C)`); None when it is mathematics."""
    text = " ".join(_TEXT.sub(r"\1", canonical(answer)).split()).strip("() ")
    if len(text) == 1 and text.isalpha():
        return text  # a choice, or a variable: its case may matter
    text = text.casefold().replace("\u2019", "'")
    return text if _WORDS.fullmatch(text) and re.search(r"[a-z]{3}", text) else None


def other_base(answer: str, right: str) -> bool:
    """Whether both are numerals with a base as subscript, and the bases differ."""
    given, wanted = (_BASE.fullmatch(canonical(a).replace(" ", "")) for a in (answer, right))
    return given is not None and wanted is not None and given[2] != wanted[2]


def number(answer: str) -> Fraction | None:
    """Returns the value of a numeral as programs and people write it (`1e3`, `5 000`, `5000`); else None."""
    text = plain(canonical(answer))
    found = list(numbers(text)) if _NUMERAL.fullmatch(text) else []
    return found[0] if len(found) == 1 else None


def other_units(answer: str, right: str) -> bool:
    r"""Whether both name units of measurement and these differ (`5\text{ cm}`, `5\text{ inches}`).

    Where an answer is made of several (`6\text{ feet }2\text{ inches}`), whether any amount does. Nothing is converted.
    """
    given, wanted = _amounts(answer), _amounts(right)
    units = [{unit for _, unit in side if unit is not None} for side in (given, wanted)]
    if max(map(len, units)) > 1:
        return given != wanted
    return all(units) and differ(*units[0], *units[1])


def _amounts(answer: str) -> Counter[tuple[Fraction | None, str | None]]:
    """Numbers with their units, of an equation those behind its last `=`.

    A letter outside of text is a variable, except where nothing but a number is with it: `5m` and `5s` differ as
    variables too.
    """
    spelt = _TEXT.sub(lambda m: f" {_LONE.sub(lambda one: LETTERS.get(one[0], '?'), m[1])} ", answer)
    text = plain(spelt).rpartition("=")[2]
    found = list(amounts(text))
    if len(found) != 1 or not _is_all(text, *found):
        found = list(amounts(plain(_LONE.sub("?", spelt)).rpartition("=")[2]))
    return Counter((amount.value, amount.unit) for amount in found)


def _is_all(text: str, amount: Amount) -> bool:
    before, after = text[: amount.start], text[amount.end :]
    return bool(_BEFORE_AMOUNT.fullmatch(before) and _AFTER_AMOUNT.fullmatch(after))


def _closings(text: str) -> dict[int, int]:
    """Returns where each opened brace closes, if it does; escaped braces do not count."""
    closing, opened = dict[int, int](), list[int]()
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def _fractions(text: str) -> str:
    r"""`\dfrac12`, `\frac \pi4`, `\tfrac{1}2` as `\frac{..}{..}`, also in one another; in one pass."""
    closing, unbraced = _closings(text), set[int]()
    edits: list[tuple[int, int, str]] = []  # what stands from here to there becomes this
    for match in _FRACTION.finditer(text):
        upper = _argument(text, match.end(), closing)
        lower = _argument(text, upper.end, closing) if upper else None
        if upper is None or lower is None or match.start() in unbraced:
            continue
        unbraced |= {part.start for part in (upper, lower) if part.stop == part.end}  # \frac\frac12 has `\frac` above
        edits.append((match.start(), upper.start, "\\frac{"))
        edits.append((upper.stop, lower.start, "}{"))
        edits.append((lower.stop, lower.end, "}"))
    parts, done = [], 0
    for start, stop, new in sorted(edits):
        parts += [text[done:start], new]
        done = stop
    return "".join([*parts, text[done:]])


class _Argument(NamedTuple):
    """Of a command: from where to where its content reaches, without braces and spaces, and where all of it ends."""

    start: int
    stop: int
    end: int


def _argument(text: str, at: int, closing: Mapping[int, int]) -> _Argument | None:
    """Returns a command's next argument from `at` on: braced, a command or one character."""
    found = _ARGUMENT.match(text, at)
    if found is None:
        return None
    start, stop = found.span(1)
    if text[start] != "{":
        return _Argument(start, stop, stop)
    if start not in closing:
        return None
    inner, stop = start + 1, closing[start]
    while inner < stop and text[inner].isspace():
        inner += 1
    while inner < stop and text[stop - 1].isspace():
        stop -= 1
    return _Argument(inner, stop, closing[start] + 1)


def _fraction_of(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction: 0.1(6) is (16 - 1) / 90."""
    sign, whole, fixed, repeated = match.groups()
    if len(fixed) + len(repeated) > 30:
        return match[0]
    upper = int(f"{whole}{fixed}{repeated}") - int(f"{whole}{fixed}" or 0)
    value = Fraction(upper, (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return f"{sign}\\frac{{{value.numerator}}}{{{value.denominator}}}"
