r"""Answers to MATH-style problems as text: where a response gives one, and one canonical spelling for equal answers.

Invariant: two answers with the same canonical spelling are mathematically equal; equalities that need algebra (1/2 and
0.5, (x+1)^2 and x^2+2x+1, {1,2} and {2,1}) are left to `math_answer`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from tba.rewards.number_text import Quantity, amounts, to_plain_text
from tba.rewards.number_words import cardinal
from tba.rewards.unicode_text import to_latex
from tba.rewards.units import LETTERS, differ

_BOX = re.compile(r"\\(?:f?boxed|fbox)(?![A-Za-z])(\s*+)")
_UNBRACED_CONTENT = re.compile(r"[^\s$]*[^\s$.,]")
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
_LAYOUT_COMMANDS = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|mathstrut|limits|bf|rm|mathop)(?![A-Za-z])"
    r"|\\(?:text)?colou?r(?:box)?\s*+\{[^{}]*\}|\\(?:bm|boldsymbol|pmb|underline|phantom|vphantom)(?=\s*+\{)"
    r"|(?<!\\)\\[()\[\]]|(?<!\\)\$|\^\s*+\{?+\s*+\\circ\s*+\}?|\\degree(?![A-Za-z])|°"
)
_ROW_SKIP = re.compile(r"\\\\\s*\[[^\[\]]{1,12}\]")  # \\[4pt]
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
_RAISED_FRACTION = re.compile(r"\^(?=\\frac\{)")
_LEVEL_OF_ONE = re.compile(r"([_^])\{\s*([0-9A-Za-z])\s*\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|\\ |,\\!)(?=\d{3}(?!\d))")
_SPACED_DIGITS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3}){1,9}(?![\d/])")
_LIST_COMMA = re.compile(r"(?<=\d),(?>(?:\s|\\[ ;:])+)(?=\d{3}(?!\d))")  # `81, 256` is no number, as `81,256` may be
_REPEATING_DECIMAL = re.compile(r"(-?)(?<!\d)(\d*+)\.(\d*+)\\(?:overline|bar|dot)\s*+\{(\d++)\}")
_ELLIPSIS = re.compile(r"(-?)(?<!\d)(\d*+)\.(\d{3,30})(?:\\[lc]?dots(?![a-z])|\.{3}|…)")
_PERIOD = re.compile(r"(\d*?)(?:(\d)\2{2,}|(\d{2,}?)\3+)")
_MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_BASE = re.compile(r"(-?[A-F]{0,9}[0-9][0-9A-Fa-f.]*)_\{?(?:\\text\{)?(\d{1,3}|[A-Za-z-]{2,20})\}{0,2}")
_WORDS = re.compile(r"[a-z][a-z'-]*(?:[ ,:]+(?:[a-z][a-z'-]*|\d{1,4}))*")
_MICRO = re.compile(r"\\mu\s*\\(?:text|mathrm)\s*\{\s*|\\(?:text|mathrm)\s*\{\s*\\mu\s*")
_SYNONYMS = (  # commands of one meaning
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
_AROUND_SIGN = re.compile(r" ?([^\w\s\\]) ?| +(?=\\)|(\\[A-Za-z]+|\\\\) +(?![A-Za-z])")  # where a space says nothing
_LEADING_SIGNS = re.compile(r"^(?>(?:\\approx(?![A-Za-z])|[=≈ ])+)")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 7`); None without a complete one.

    An empty one (`\boxed{}`, `\boxed{...}`) counts only where no other has a content, and so does a mere mention:
    `\boxed as asked`.
    """
    span = boxed_span(text)
    return text[slice(*span)] if span else None


def boxed_span(text: str) -> tuple[int, int] | None:
    """Returns where the text of `last_boxed` begins and ends."""
    spans: dict[str, tuple[int, int]] = {}
    closings = _closing_braces(text)
    for match in _BOX.finditer(text):
        at = match.end()
        if text[at : at + 1] == "{":
            if at in closings:
                filler = closings[at] - at < _LONGEST_PLACEHOLDER and _PLACEHOLDER.fullmatch(text, at + 1, closings[at])
                spans["empty" if filler else "braced"] = (at + 1, closings[at])
        elif match[1].strip(" ") == "" != match[1] and (bare_content := _UNBRACED_CONTENT.match(text, at)):
            if _AMOUNT.match(text, at):
                spans["braced"] = bare_content.span()
            else:
                spans["mentioned"] = bare_content.span()
    return next((spans[kind] for kind in ("braced", "mentioned", "empty") if kind in spans), None)


@functools.lru_cache(4096)  # every answer of a group is compared with the same right one, several times
def canonicalize(answer: str) -> str:
    """Returns one spelling for answers that differ only in spacing, in the size of brackets and fractions, etc."""
    answer = to_latex(answer)
    emphasis = _EMPHASIS.fullmatch(answer)
    text = _ROW_SKIP.sub(r"\\\\ ", emphasis[2] if emphasis else answer)
    text = _SPACED_DIGITS.sub(_join_digits, _THOUSANDS.sub("", _LIST_COMMA.sub(";", text)))
    text = _FUNCTION.sub(r"\\\1 ", _IMAGINARY.sub(r" \1 ", _LAYOUT_COMMANDS.sub("", text)))
    for pattern, spelling in _SYNONYMS:
        text = pattern.sub(spelling, text)
    text = _TEXT.sub(lambda m: f"\\text{{{m[1].strip()}}}" if _LETTER.search(m[1]) else m[1], text)
    text = _LAST_ROW.sub("", _MATRIX.sub("{pmatrix}", text))
    text = _REPEATING_DECIMAL.sub(_as_fraction, _ELLIPSIS.sub(_mark_period, text))
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    text = _brace_exponents(_normalize_fractions(text))
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _LEVEL_OF_ONE.sub(r"\1\2", text)
    text = _LEADING_SIGNS.sub("", _SPACES.sub(" ", text).strip()).rstrip(" .,;")
    text = _unwrap(text)
    text_command = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    text = text_command[1].strip() if text_command else text
    if text.startswith("."):
        text = f"0{text}"
    return _AROUND_SIGN.sub(r"\1\2", text)


def _join_digits(match: re.Match[str]) -> str:
    """Returns groups of digits that can be no list (see `number_text`) as one number."""
    groups = match[0].split(" ")
    return "".join(groups) if len(groups) > 2 or groups[1].startswith("0") else match[0]


def _unwrap(text: str) -> str:
    """Returns the text without braces around all of it."""
    closings, depth = _closing_braces(text) if text.startswith("{") else {}, 0
    while closings.get(depth) == len(text) - 1 - depth:
        depth += 1
    return text[depth : len(text) - depth].strip()


def _brace_exponents(text: str) -> str:
    r"""Returns a text with `2^\frac{1}{3}` written as `2^{\frac{1}{3}}`."""
    closings = _closing_braces(text) if _RAISED_FRACTION.search(text) else {}
    edits: list[tuple[int, str]] = []
    for match in _RAISED_FRACTION.finditer(text):
        numerator_end = closings.get(match.end() + len(r"\frac"))
        denominator_end = closings.get(numerator_end + 1) if numerator_end is not None else None
        if denominator_end is not None:
            edits += [(match.end(), "{"), (denominator_end + 1, "}")]
    parts, copied_end = [], 0
    for position, brace in sorted(edits):
        parts += [text[copied_end:position], brace]
        copied_end = position
    return "".join([*parts, text[copied_end:]])


def canonical_words(answer: str) -> str | None:
    """Returns one spelling of an answer in words (`June 20`, `no solution`, `(C)`); None when it is mathematics."""
    text = " ".join(_TEXT.sub(r"\1", canonicalize(answer)).split()).strip("() ")
    if len(text) == 1 and text.isalpha():
        return text  # a choice, or a variable: its case may matter
    text = text.casefold().replace("\u2019", "'")
    return text if _WORDS.fullmatch(text) and re.search(r"[a-z]{3}", text) else None


def bases_differ(answer: str, target: str) -> bool:
    """Returns whether both are numerals with a base as subscript, and the bases differ."""
    answer_base, target_base = (split_base(canonicalize(a)) for a in (answer, target))
    return answer_base is not None and target_base is not None and answer_base[1] != target_base[1]


def split_base(text: str) -> tuple[str, int] | None:
    r"""Returns the digits and the base of a canonical numeral such as `2A_{16}` or `345_{\text{six}}`; else None."""
    match = _BASE.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    base = Fraction(match[2]) if match[2].isdigit() else cardinal(match[2])
    return None if base is None else (match[1].upper(), int(base))


def units_differ(answer: str, target: str) -> bool:
    r"""Returns whether both name units of measurement and these differ (`5\text{ cm}`, `5\text{ inches}`).

    Where an answer is made of several (`6\text{ feet }2\text{ inches}`), whether any amount does. Nothing is converted.
    """
    answer_amounts, target_amounts = _count_amounts(answer), _count_amounts(target)
    units = [{unit for _, unit in side if unit is not None} for side in (answer_amounts, target_amounts)]
    if max(map(len, units)) > 1:
        return answer_amounts != target_amounts
    return all(units) and differ(*units[0], *units[1])


def _count_amounts(answer: str) -> Counter[tuple[Fraction | None, str | None]]:
    """Returns the numbers with their units, of an equation those behind its last `=`.

    A letter outside of text is a variable, except where nothing but a number is with it: `5m` and `5s` differ as
    variables too.
    """
    spelled = _TEXT.sub(
        lambda m: f" {_LONE.sub(lambda n: LETTERS.get(n[0], '?'), m[1])} ", _MICRO.sub(r"\\text{µ", answer)
    )
    text = to_plain_text(spelled).rpartition("=")[2]
    quantities = list(amounts(text))
    if len(quantities) != 1 or not _fills_text(text, *quantities):
        quantities = list(amounts(to_plain_text(_LONE.sub("?", spelled)).rpartition("=")[2]))
    return Counter((amount.value, amount.unit) for amount in quantities)


def _fills_text(text: str, amount: Quantity) -> bool:
    prefix, suffix = text[: amount.start], text[amount.end :]
    return bool(_BEFORE_AMOUNT.fullmatch(prefix) and _AFTER_AMOUNT.fullmatch(suffix))


def _closing_braces(text: str) -> dict[int, int]:
    """Returns where each opened brace closes, if it does; escaped braces do not count."""
    closings, open_braces = dict[int, int](), list[int]()
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            closings[open_braces.pop()] = match.start()
    return closings


def _normalize_fractions(text: str) -> str:
    r"""Returns a text with `\dfrac12`, `\frac \pi4`, `\tfrac{1}2` written as `\frac{..}{..}`, also in one another."""
    closings, arguments = _closing_braces(text), set[int]()
    edits: list[tuple[int, int, str]] = []  # start, end, and what stands between them from now on
    for match in _FRACTION.finditer(text):
        numerator = _next_argument(text, match.end(), closings)
        denominator = _next_argument(text, numerator.end, closings) if numerator else None
        if numerator is None or denominator is None or match.start() in arguments:
            continue
        arguments |= {part.start for part in (numerator, denominator) if part.stop == part.end}  # \frac of \frac\frac12
        edits.append((match.start(), numerator.start, "\\frac{"))
        edits.append((numerator.stop, denominator.start, "}{"))
        edits.append((denominator.stop, denominator.end, "}"))
    parts, copied_end = [], 0
    for start, stop, replacement in sorted(edits):
        parts += [text[copied_end:start], replacement]
        copied_end = stop
    return "".join([*parts, text[copied_end:]])


class _Argument(NamedTuple):
    """An argument of a command: its content without braces and spaces, from `start` to `stop`, and where it ends."""

    start: int
    stop: int
    end: int


def _next_argument(text: str, position: int, closings: Mapping[int, int]) -> _Argument | None:
    """Returns a command's next argument from a position on: braced, a command or one character."""
    match = _ARGUMENT.match(text, position)
    if match is None:
        return None
    start, stop = match.span(1)
    if text[start] != "{":
        return _Argument(start, stop, stop)
    if start not in closings:
        return None
    start_inside, stop = start + 1, closings[start]
    while start_inside < stop and text[start_inside].isspace():
        start_inside += 1
    while start_inside < stop and text[stop - 1].isspace():
        stop -= 1
    return _Argument(start_inside, stop, closings[start] + 1)


def _mark_period(match: re.Match[str]) -> str:
    r"""Returns `0.1666\ldots` as `0.1\overline{6}`, if its digits repeat."""
    repetition = _PERIOD.fullmatch(match[3])
    period = (repetition[2] or repetition[3]) if repetition else None
    return f"{match[1]}{match[2]}.{repetition[1]}\\overline{{{period}}}" if repetition and period else match[0]


def _as_fraction(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction: 0.1(6) is (16 - 1) / 90."""
    sign, whole_digits, fixed_digits, repeated_digits = match.groups()
    if len(fixed_digits) + len(repeated_digits) > 30:
        return match[0]
    numerator = int(f"{whole_digits}{fixed_digits}{repeated_digits}") - int(f"{whole_digits}{fixed_digits}" or 0)
    value = Fraction(numerator, (10 ** len(repeated_digits) - 1) * 10 ** len(fixed_digits))
    return f"{sign}\\frac{{{value.numerator}}}{{{value.denominator}}}"
