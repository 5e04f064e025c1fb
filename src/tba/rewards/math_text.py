r"""Answers to MATH-style problems as text: where a response gives one, and one canonical spelling for equal answers.

Invariant: two answers with the same `canonical` spelling are mathematically equal; equalities that need algebra (1/2
and 0.5, (x+1)^2 and x^2+2x+1, {1,2} and {2,1}) are left to `math_answer`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from tba.rewards.number_text import Amount, amounts, plain
from tba.rewards.number_words import cardinal
from tba.rewards.unicode_text import latex
from tba.rewards.units import LETTERS, differ

_BOX = re.compile(r"\\(?:f?boxed|fbox)(?![A-Za-z])(\s*+)")
_UNBRACED = re.compile(r"[^\s$]*[^\s$.,]")
_AMOUNT = re.compile(r"[-+$]?\\?\$?[0-9.]")
_PLACEHOLDER = re.compile(
    r"\s*(?:\.{3}|…|\\[cl]?dots|\\square|\?|\\text\{\s*\}|(?:\\text\{)?(?:your |final )?answer(?: here)?\}?)?\s*"
)
_LONE = re.compile(r"(?<![A-Za-zµ])(?![AaPp]\.[Mm](?![A-Za-z]))(?<![AaPp]\.)[A-Za-z](?![A-Za-z])")  # but of `p.m.`
_BEFORE_AMOUNT = re.compile(r"[\s$€({]*+")
_AFTER_AMOUNT = re.compile(r"[\s.)}]*+")
_LONGEST_PLACEHOLDER = 40
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one does not count
_EMPHASIS = re.compile(r"\s*+(\*{1,3})([^*]+)\1\s*")  # **5** of Markdown
_SPACES = re.compile(r"(?>(?:(?<!\\)\\[,;:!> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z])|\s)+)")
_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|mathstrut|limits|bf|rm|mathop)(?![A-Za-z])"
    r"|\\(?:text)?colou?r(?:box)?\s*+\{[^{}]*\}|\\(?:bm|boldsymbol|pmb|underline|phantom|vphantom)(?=\s*+\{)"
    r"|(?<!\\)\\[()\[\]]|(?<!\\)\$|\^\s*+\{?+\s*+\\circ\s*+\}?|\\degree(?![A-Za-z])|°"
)
_SKIP = re.compile(r"\\\\\s*\[[^\[\]]{1,12}\]")  # \\[4pt]
_FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])")
_ARGUMENT = re.compile(r" *+(\{|\\[A-Za-z]++|[0-9A-Za-z])")
_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"[A-Za-z]")
_IMAGINARY = re.compile(r"\\mathrm\s*\{\s*([ie])\s*\}")
_FUNCTION = re.compile(
    r"\\(?:operatorname|mathrm|text)\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|gcd|max|min|det)\s*\}"
)
_MATRIX = re.compile(r"\{[bB]?matrix\}|\{smallmatrix\}")  # a vmatrix is a determinant
_LAST_ROW = re.compile(r"\\\\ *+(?=\\end\{)")
_RAISED = re.compile(r"\^(?=\\frac\{)")
_LEVEL_OF_ONE = re.compile(r"([_^])\{\s*([0-9A-Za-z])\s*\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|\\ |,\\!)(?=\d{3}(?!\d))")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3}){1,9}(?![\d/])")
_LISTED = re.compile(r"(?<=\d),(?>(?:\s|\\[ ;:])+)(?=\d{3}(?!\d))")  # `81, 256` is no number, as `81,256` may be
_REPEATING = re.compile(r"(-?)(?<!\d)(\d*+)\.(\d*+)\\(?:overline|bar|dot)\s*+\{(\d++)\}")
_ELLIPSIS = re.compile(r"(-?)(?<!\d)(\d*+)\.(\d{3,30})(?:\\[lc]?dots(?![a-z])|\.{3}|…)")
_PERIOD = re.compile(r"(\d*?)(?:(\d)\2{2,}|(\d{2,}?)\3+)")
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_BASE = re.compile(r"(-?[A-F]{0,9}[0-9][0-9A-Fa-f.]*)_\{?(?:\\text\{)?(\d{1,3}|[A-Za-z-]{2,20})\}{0,2}")
_WORDS = re.compile(r"[a-z][a-z'-]*(?:[ ,:]+(?:[a-z][a-z'-]*|\d{1,4}))*")
_MICRO = re.compile(r"\\mu\s*\\(?:text|mathrm)\s*\{\s*|\\(?:text|mathrm)\s*\{\s*\\mu\s*")
_SAME = (  # commands of one meaning
    (re.compile(r"\\leq?slant(?![A-Za-z])|\\leq(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\geq?slant(?![A-Za-z])|\\geq(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\pounds(?![A-Za-z])"), "£"),
    (re.compile(r"\\colon(?![A-Za-z])"), ":"),
    (_MICRO, r"\\text{µ"),
    (re.compile(r"\\(?:langle|lang)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rangle|rang)(?![A-Za-z])"), ")"),
    (re.compile(r"\\(?:lvert|rvert|vert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\mathbb *\{? *R *\}?|\\R(?:eals)?(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\\\{ *\\\}"), r"\\emptyset "),
    (re.compile(r"\\d?dots(?![A-Za-z])|\\[lc]dots(?![A-Za-z])|…"), r"\\ldots "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\infin(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\+\s*\\infty"), r"\\infty"),
)
_AROUND = re.compile(r" ?([^\w\s\\]) ?| +(?=\\)|(\\[A-Za-z]+|\\\\) +(?![A-Za-z])")  # where a space says nothing
_LEADING = re.compile(r"^(?>(?:\\approx(?![A-Za-z])|[=≈ ])+)")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 7`); None without a complete one.

    An empty one (`\boxed{}`, `\boxed{...}`) counts only where no other has a content, and so does a mere mention:
    `\boxed as asked`.
    """
    found = boxed_span(text)
    return text[slice(*found)] if found else None


def boxed_span(text: str) -> tuple[int, int] | None:
    """Returns where the content that `last_boxed` returns begins and ends."""
    found: dict[str, tuple[int, int]] = {}
    closing = _closings(text)
    for match in _BOX.finditer(text):
        at = match.end()
        if text[at : at + 1] == "{":
            if at in closing:
                empty = closing[at] - at < _LONGEST_PLACEHOLDER and _PLACEHOLDER.fullmatch(text, at + 1, closing[at])
                found["empty" if empty else "braced"] = (at + 1, closing[at])
        elif match[1].strip(" ") == "" != match[1] and (bare := _UNBRACED.match(text, at)):
            if _AMOUNT.match(text, at):
                found["braced"] = bare.span()
            else:
                found["mentioned"] = bare.span()
    return next((found[kind] for kind in ("braced", "mentioned", "empty") if kind in found), None)


@functools.lru_cache(4096)  # every answer of a group is compared with the same right one, several times
def canonical(answer: str) -> str:
    """Returns one spelling for answers that differ only in spacing, in the size of brackets and fractions, etc."""
    answer = latex(answer)
    emphasised = _EMPHASIS.fullmatch(answer)
    text = _SKIP.sub(r"\\\\ ", emphasised[2] if emphasised else answer)
    text = _SPACED.sub(_spaced, _THOUSANDS.sub("", _LISTED.sub(";", text)))
    text = _FUNCTION.sub(r"\\\1 ", _IMAGINARY.sub(r" \1 ", _DROPPED.sub("", text)))
    for pattern, spelling in _SAME:
        text = pattern.sub(spelling, text)
    text = _TEXT.sub(lambda m: f"\\text{{{m[1].strip()}}}" if _LETTER.search(m[1]) else m[1], text)
    text = _LAST_ROW.sub("", _MATRIX.sub("{pmatrix}", text))
    text = _REPEATING.sub(_fraction_of, _ELLIPSIS.sub(_periodic, text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _braced_exponents(_fractions(text))
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _LEVEL_OF_ONE.sub(r"\1\2", text)
    text = _LEADING.sub("", _SPACES.sub(" ", text).strip()).rstrip(" .,;")
    text = _unwrapped(text)
    whole = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    text = whole[1].strip() if whole else text
    if text.startswith("."):
        text = f"0{text}"
    return _AROUND.sub(r"\1\2", text)


def _spaced(match: re.Match[str]) -> str:
    """Joins groups of digits that can be no list: see `number_text`."""
    groups = match[0].split(" ")
    return "".join(groups) if len(groups) > 2 or groups[1].startswith("0") else match[0]


def _unwrapped(text: str) -> str:
    """Returns the text without braces around all of it."""
    closing, depth = _closings(text) if text.startswith("{") else {}, 0
    while closing.get(depth) == len(text) - 1 - depth:
        depth += 1
    return text[depth : len(text) - depth].strip()


def _braced_exponents(text: str) -> str:
    r"""`2^\frac{1}{3}` as `2^{\frac{1}{3}}`."""
    closing = _closings(text) if _RAISED.search(text) else {}
    edits: list[tuple[int, str]] = []
    for match in _RAISED.finditer(text):
        upper = closing.get(match.end() + len(r"\frac"))
        lower = closing.get(upper + 1) if upper is not None else None
        if lower is not None:
            edits += [(match.end(), "{"), (lower + 1, "}")]
    parts, done = [], 0
    for at, brace in sorted(edits):
        parts += [text[done:at], brace]
        done = at
    return "".join([*parts, text[done:]])


def words(answer: str) -> str | None:
    """Returns one spelling of an answer in words (`June 20`, `no solution`, `(C)`); None when it is mathematics."""
    text = " ".join(_TEXT.sub(r"\1", canonical(answer)).split()).strip("() ")
    if len(text) == 1 and text.isalpha():
        return text  # a choice, or a variable: its case may matter
    text = text.casefold().replace("\u2019", "'")
    return text if _WORDS.fullmatch(text) and re.search(r"[a-z]{3}", text) else None


def other_base(answer: str, right: str) -> bool:
    """Returns whether both are numerals with a base as subscript, and the bases differ."""
    given, wanted = (base(canonical(a)) for a in (answer, right))
    return given is not None and wanted is not None and given[1] != wanted[1]


def base(text: str) -> tuple[str, int] | None:
    r"""Returns the digits and the base of a canonical numeral such as `2A_{16}` or `345_{\text{six}}`; else None."""
    found = _BASE.fullmatch(text.replace(" ", ""))
    if found is None:
        return None
    said = Fraction(found[2]) if found[2].isdigit() else cardinal(found[2])
    return None if said is None else (found[1].upper(), int(said))


def other_units(answer: str, right: str) -> bool:
    r"""Returns whether both name units of measurement and these differ (`5\text{ cm}`, `5\text{ inches}`).

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
    spelt = _TEXT.sub(
        lambda m: f" {_LONE.sub(lambda one: LETTERS.get(one[0], '?'), m[1])} ", _MICRO.sub(r"\\text{µ", answer)
    )
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


def _periodic(match: re.Match[str]) -> str:
    r"""Returns `0.1666\ldots` as `0.1\overline{6}`, if its digits repeat."""
    found = _PERIOD.fullmatch(match[3])
    period = (found[2] or found[3]) if found else None
    return f"{match[1]}{match[2]}.{found[1]}\\overline{{{period}}}" if found and period else match[0]


def _fraction_of(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction: 0.1(6) is (16 - 1) / 90."""
    sign, whole, fixed, repeated = match.groups()
    if len(fixed) + len(repeated) > 30:
        return match[0]
    upper = int(f"{whole}{fixed}{repeated}") - int(f"{whole}{fixed}" or 0)
    value = Fraction(upper, (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return f"{sign}\\frac{{{value.numerator}}}{{{value.denominator}}}"
