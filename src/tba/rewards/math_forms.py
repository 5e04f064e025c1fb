r"""Answers to MATH-style problems by their form: lists, points, regions, matrices, equations, choices, numbers.

Invariant: what a form says is never undone by algebra (a list of two is no number, `(1,2)` is not `{1,2}`), and what
has no form is left to the caller's `compare`. Any text of bounded length has a verdict in time linear in it, but for
lists: each item is compared with each, up to `_MOST_ITEMS`.

Texts are canonical (`math_text`). Two readings are tried of `81,256`: a number, and a list; `81, 256` is a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

from tba.rewards.math_text import canonical_words, canonicalize, split_base
from tba.rewards.number_words import cardinal, ordinal

Compare = Callable[[str, str], bool | None]  # whether two texts without a form are equal; None: it cannot tell

_T = TypeVar("_T")
_MOST_ITEMS = 40  # of a list, where every item is compared with every other; longer ones only in order
_OPEN_OR_CLOSE = re.compile(r"\\?[{}()\[\]]|\\begin|\\end")
_AND_OR = r"\\text\{,? ?(?:and|or|,) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\lor(?![a-z])|\\vee(?![a-z])|\\&"
_ITEMS = re.compile(rf"[,;]|{_AND_OR}")
_COMMA = re.compile(r"[,;]")
_OR = re.compile(r"\\text\{,? ?or ?\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![a-z])|\\vee(?![a-z])")
_AND = re.compile(r"\\text\{,? ?and ?\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\land(?![a-z])|\\wedge(?![a-z])")
_CUP = re.compile(r"\\cup(?![a-z])")
_EQUALS = re.compile(r"=|\\approx(?![a-z])|≈")
_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|<|>")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_NAME = r"(?:[A-Za-z]|\\(?!pi|infty)[a-z]+)(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))?"
_IS_NAME = re.compile(_NAME)
_LEFT_SIDE = re.compile(rf"(?:{_NAME}|[A-Za-z]\([^()]*\)|\\text\{{[^{{}}]*\}}|\([A-Za-z](?:,[A-Za-z])+\))")
_MEMBERSHIP = re.compile(rf"(?P<name>{_NAME})\\in ?(?P<set>.+)", re.DOTALL)
_SET_BUILDER = re.compile(
    rf"\\\{{ ?(?P<name>{_NAME})(?P<domain>\\in ?\\mathbb\{{R\}})?(?:\\mid ?|\||:)(?P<condition>.+)\\\}}", re.DOTALL
)
_ALL_REALS = re.compile(
    r"\\mathbb\{R\}|(?:the )?(?:set of )?(?:all )?(?:the )?(?:reals|reals? numbers?)|(?:all|any) reals?(?: numbers?)?"
)
_REGION_SIGN = re.compile(r"[<>]|\\(?:le|ge|ne|cup|mathbb)(?![a-z])|\breals?\b", re.IGNORECASE)
_ROWS = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
_UNIT_VECTOR = re.compile(r"\\(?:hat|vec|text)\{(?:\\(?:mathbf|text)\{)?\\?([ijk])(?:math)?\}\}?")
_LABEL = re.compile(
    r"(?:\\text\{)?[A-Za-z][A-Za-z ]{1,60}?(?: is| are| equals|:|(?<=answer)) ?(?:\}|(?=[^{}]*$)|(?=[^{}]*\{)) ?:?",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z']+")
_TURNING_WORDS = {  # words that make another answer of it
    *("not", "isn't", "except", "least", "most", "more", "less", "fewer", "greater", "larger", "smaller", "over"),
    *("under", "between", "without", "nor", "neither"),
}
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer) ?)?(?:\(([A-Z])\)[.:]?|([A-Z])(?:\)|[.:](?!\d))|([A-Z])$)\s*(.*)",
    re.DOTALL | re.IGNORECASE,
)
_LETTER_PERIOD = re.compile(r"^(\s*(?:\\text[a-z]*\s*\{\s*)?[A-Z])[.:](?=\}?\s)")  # B. 12
_RATIO = re.compile(r"[0-9.]+(?::[0-9.]+)+")
_NUMERAL = re.compile(r"-?[0-9.]+")
_CLOCK = re.compile(r"(?:at )?(\d{1,2}):(\d\d) ?(?:([ap])\.?m\.?)?", re.IGNORECASE)
_GROUPED_THOUSANDS = re.compile(r"(?<![\d,.(\[{])([1-9]\d{0,2}(?:,\d{3})+)(?![\d,)\]}]|\\\})")
_VALUE = re.compile(
    r"""(?P<sign>[-+]?)(?:\\\$|[£€¥₹$])?(?P<inner>-?)
        (?: (?P<whole>\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:\\frac\{(?P<top>\d{1,99})\}\{(?P<bottom>\d{1,99})\})?
          | \\frac\{(?P<numerator>-?\d{1,400})\}\{(?P<denominator>-?\d{1,400})\} )
        (?:/(?P<divisor>\d{1,99}))?
        (?: (?:\\times|\\cdot|[*x]) ?10\^(?:\{(?P<ten>-?\d{1,3})\}|(?P<digit>\d)) | (?P<e>[eE][-+]?\d{1,3}) )?
        (?P<scale>(?:\ ?\\text\{|\ )?(?:hundred|thousand|million|billion|trillion)\}?)?
        (?P<percent>\\?%|\\text\{\\?(?:percent|%)\}|\ percent)?
        (?:\ ?\\text\{[A-Za-z .,/()²³µ-]*\}(?:\^\{?[23]\}?)?)?""",
    re.VERBOSE,
)
_EMPTY_SET = {"\\emptyset", "no solution", "no solutions", "the empty set", "empty set"}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


@dataclass(frozen=True)
class _List:
    """Items in any order: a list, a set, several roots."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class _Tuple:
    """Items in order between brackets: a point, an interval."""

    opening: str
    items: tuple[str, ...]
    closing: str


@dataclass(frozen=True)
class _Matrix:
    """A matrix."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Bindings:
    """Values by name: `x=2, y=3`."""

    values: tuple[tuple[str, str], ...]  # by name


@dataclass(frozen=True)
class _NumberInterval:
    """The numbers between two ends; an open end is not part of it."""

    low: str
    open_low: bool
    high: str
    open_high: bool


@dataclass(frozen=True)
class _Region:
    """A union of intervals, and the name of what is in it, if that is said."""

    intervals: tuple[_NumberInterval, ...]
    name: str | None


_Form = _List | _Tuple | _Matrix | _Bindings | _Region | str
_REAL_LINE = _NumberInterval("-\\infty", True, "\\infty", True)


def equal_by_form(answer: str, right_answer: str, compare: Compare) -> bool | None:
    """Returns whether two answers are equal by their forms, or by `compare` where they have none; None where that is
    undecided.
    """
    text_a, text_b = (_without_label(canonicalize(_LETTER_PERIOD.sub(r"\1)", text))) for text in (answer, right_answer))
    if text_a == text_b or {text_a, text_b} <= _EMPTY_SET or _same_numeral(text_a, text_b):
        return True
    has_words = any(text[:1].isalpha() and cardinal(text) is not None for text in (text_a, text_b))
    if has_words and (verdict := equal_in_words(text_a, text_b)) is not None:
        return verdict  # before it is taken for a list: two and a half
    choices_agree = _same_choice(text_a, text_b)
    if choices_agree is not None:
        return choices_agree
    if _turning_words(text_a) != _turning_words(text_b):
        return False
    clocks = [_CLOCK.fullmatch(_TEXT.sub(r"\1", text)) for text in (text_a, text_b)]
    if clocks[0] and clocks[1]:
        return _same_clock(clocks[0], clocks[1])
    if any(_RATIO.fullmatch(a) and _NUMERAL.fullmatch(b) for a, b in ((text_a, text_b), (text_b, text_a))):
        return False
    readings = [(text_a, text_b)]
    joined_texts = (_join_thousands(text_a), _join_thousands(text_b))
    if joined_texts != (text_a, text_b):
        readings.append(joined_texts)
    return _any(_equal_forms(read_form(a), read_form(b), a, b, compare) for a, b in readings)


def _same_numeral(a: str, b: str) -> bool:
    """Returns whether two numerals have the same digits, and one of them does not say its base: `2A_{16}` and `2A`."""
    numerals = split_base(a), split_base(b)
    digits = [numeral[0] if numeral else text.upper() for numeral, text in zip(numerals, (a, b), strict=True)]
    return numerals != (None, None) and digits[0] == digits[1] and (None in numerals or numerals[0] == numerals[1])


def equal_in_words(a: str, b: str) -> bool | None:
    """Returns whether two canonical texts are equal as numbers or as words; None where that takes algebra."""
    if a == b:
        return True
    numbers = _read_number(a), _read_number(b)
    if numbers[0] is not None and numbers[1] is not None:
        return equal_values(numbers[0], numbers[1])
    ordinals = ordinal(a), ordinal(b)
    if None not in ordinals:
        return ordinals[0] == ordinals[1]
    spellings = canonical_words(a), canonical_words(b)
    if spellings[0] is None or spellings[1] is None:
        return None
    return True if spellings[0] == spellings[1] else None


def _read_number(text: str) -> tuple[Fraction, bool] | None:
    """Returns what `read_value` does, also for a number in words."""
    value = read_value(text)
    if value is None and text[:1].isalpha() | text.startswith("\\text") and (number := cardinal(text)) is not None:
        return number, False
    return value


def read_value(text: str) -> tuple[Fraction, bool] | None:
    """Returns the value of a canonical numeral, fraction or mixed number, and whether it is in percent; else None."""
    match = _VALUE.fullmatch(text)
    if match is None:
        return None
    exponent = match["ten"] or match["digit"]
    if match["e"]:
        if not _is_exponent(match):
            return None
        exponent = match["e"][1:]
    try:
        numerator, denominator = match["numerator"], match["denominator"]
        number = Fraction(int(numerator), int(denominator)) if numerator else Fraction(match["whole"])
        if match["top"]:
            number += Fraction(int(match["top"]), int(match["bottom"]))
        number /= int(match["divisor"] or 1)
    except ZeroDivisionError:
        return None
    if match["top"] and "." in match["whole"]:
        return None
    number *= Fraction(10) ** int(exponent or 0)
    number *= next((factor for word, factor in _SCALES.items() if word in (match["scale"] or "")), 1)
    is_negative = (match["sign"] == "-") != (match["inner"] == "-")
    return (-number if is_negative else number), match["percent"] is not None


def _is_exponent(match: re.Match[str]) -> bool:
    """Returns whether the e of `1e-3` is a program's; `2e-1` may be 2e - 1, with Euler's number."""
    has_sign = match["e"][1] in "+-"
    return not has_sign or match["whole"] == "1" or "." in match["whole"] or len(match["e"]) > 3


def equal_values(a: tuple[Fraction, bool], b: tuple[Fraction, bool]) -> bool:
    """Returns whether two numbers, each perhaps in percent, are equal: `50\\%` and 0.5; where only one says %, 50 and
    50 too.

    Less than 1 is no number of percent that leaves out its sign: 0.35 % is not 0.35.
    """
    if a[1] == b[1]:
        return a[0] == b[0]
    if a[0] == b[0]:
        return b[1] or abs(b[0]) >= 1 or not b[0]
    return (a[0] / 100 if a[1] else a[0]) == (b[0] / 100 if b[1] else b[0])


def read_form(text: str) -> _Form:
    """Returns a canonical text's form; the text itself if it has none."""
    if match := _MEMBERSHIP.fullmatch(text):
        member_form = read_form(match["set"])
        return _Region(member_form.intervals, match["name"]) if isinstance(member_form, _Region) else member_form
    if region := _read_region(text):
        return region
    items = _split_outside(text, _ITEMS)
    if len(items) > 1:
        return _read_list(items)
    if match := _ROWS.fullmatch(text):
        rows = tuple(tuple(cell.strip() for cell in row.split("&")) for row in match[1].split("\\\\"))
        return _Matrix(rows) if "\\begin" not in match[1] else text
    if vector := _read_vector(text):
        return vector
    if brackets := _split_brackets(text):
        opening, content, closing = brackets
        parts = _split_outside(content, _COMMA if opening != "\\{" else _ITEMS)
        if opening == "\\{":
            return text if len(parts) == 1 and re.search(r"\\mid|:|\|", content) else _read_list(parts, False)
        if len(parts) > 1:
            return _Tuple(opening, tuple(parts), closing)
        if (opening, closing) == ("(", ")"):
            return read_form(content)
    if _PLUS_MINUS.search(text):
        name, equals_sign, right_side = text.partition("=")
        if not equals_sign or _IS_NAME.fullmatch(name):
            return _List(tuple(_choose_sign(right_side if equals_sign else text, sign) for sign in "+-"))
    return text


def _choose_sign(text: str, sign: str) -> str:
    text = _PLUS_MINUS.sub(sign, text).replace("\\mp", "-" if sign == "+" else "+")
    return text.removeprefix("+")


def _read_list(items: Sequence[str], allow_names: bool = True) -> _Form:
    sides = [item.split("=", 1) for item in items]
    if allow_names and all(len(side) == 2 and _IS_NAME.fullmatch(side[0]) for side in sides):
        names = [side[0] for side in sides]
        if len(set(names)) == len(names):
            return _Bindings(tuple(sorted((name, value) for name, value in sides)))
        if len(set(names)) == 1:
            items = [side[1] for side in sides]
    elif allow_names and len(sides[0]) == 2 and _IS_NAME.fullmatch(sides[0][0]) and all(len(s) == 1 for s in sides[1:]):
        items = [sides[0][1], *items[1:]]
    parts = list[str]()
    for item in items:
        item_form = read_form(item) if _PLUS_MINUS.search(item) else item
        parts.extend(item_form.items if isinstance(item_form, _List) else [item])
    return _List(tuple(parts))


def _read_region(text: str) -> _Region | None:
    """Returns the numbers that inequalities, intervals joined by cups or a set's condition describe."""
    if _REGION_SIGN.search(text) is None:
        return None
    if _ALL_REALS.fullmatch(_TEXT.sub(r"\1", text).casefold().replace("\\mathbb{r}", "\\mathbb{R}")):
        return _Region((_REAL_LINE,), None)
    if match := _SET_BUILDER.fullmatch(text):
        inner_region = _read_region(match["condition"])
        return inner_region if inner_region and inner_region.name == match["name"] else None
    union_parts = _split_outside(text, _CUP)
    if len(union_parts) > 1:
        parts = [_read_region(part) or _as_region(read_form(part)) for part in union_parts]
    else:
        alternatives = _split_outside(text, _OR)
        if len(alternatives) == 1:
            return _read_inequality(text) or _read_two_inequalities(_split_outside(text, _AND))
        parts = [_read_region(part) for part in alternatives]
    regions = [part for part in parts if part is not None]
    names = {part.name for part in regions} - {None}
    if len(regions) < len(parts) or len(names) > 1:
        return None
    return _Region(tuple(i for part in regions for i in part.intervals), next(iter(names), None))


def _as_region(interval: _Form) -> _Region | None:
    """Returns the region between the two ends of an interval; None for any other form."""
    if not isinstance(interval, _Tuple) or len(interval.items) != 2:
        return None
    low, high = interval.items
    return _Region((_NumberInterval(low, interval.opening == "(", high, interval.closing == ")"),), None)


def _read_inequality(text: str) -> _Region | None:
    """Returns the region of `x<2`, `2\\le x`, `0<x<1` or `x\\ne2`."""
    signs = [match[0] for match in _matches_outside(text, _RELATION)]
    parts = _split_outside(text, _RELATION)
    if len(parts) != len(signs) + 1 or not 1 <= len(signs) <= 2:
        return None
    name_at = next((i for i, part in enumerate(parts) if _IS_NAME.fullmatch(part)), None)
    if name_at is None or sum(_IS_NAME.fullmatch(part) is not None for part in parts) != 1:
        return None
    name = parts[name_at]
    if signs == ["\\ne"]:
        value = parts[1 - name_at]
        return _Region(
            (_NumberInterval("-\\infty", True, value, True), _NumberInterval(value, True, "\\infty", True)), name
        )
    if len(signs) == 2 and name_at != 1:
        return None
    low, open_low, high, open_high = "-\\infty", True, "\\infty", True
    if "\\ne" in signs or len({sign in ("<", "\\le") for sign in signs}) > 1:
        return None  # 1 < x > 2
    for i, sign in enumerate(signs):
        is_left_bound = i < name_at  # the sign stands left of the name
        bound = parts[i if is_left_bound else i + 1]
        if (sign in ("<", "\\le")) == is_left_bound:
            low, open_low = bound, sign in "<>"
        else:
            high, open_high = bound, sign in "<>"
    return _Region((_NumberInterval(low, open_low, high, open_high),), name)


def _read_two_inequalities(parts: Sequence[str]) -> _Region | None:
    """Returns the region of `x>1` and `x<3`."""
    regions = [_read_inequality(part) for part in parts]
    if len(parts) != 2 or regions[0] is None or regions[1] is None or regions[0].name != regions[1].name:
        return None
    if len(regions[0].intervals) + len(regions[1].intervals) != 2:
        return None
    lower, upper = regions[0].intervals[0], regions[1].intervals[0]
    if lower.low == "-\\infty":
        lower, upper = upper, lower
    if lower.high != "\\infty" or upper.low != "-\\infty":
        return None
    return _Region((_NumberInterval(lower.low, lower.open_low, upper.high, upper.open_high),), regions[0].name)


def _read_vector(text: str) -> _Tuple | None:
    r"""Returns `2\mathbf{i}-\mathbf{k}` as (2,0,-1)."""
    unit_vectors = list(_UNIT_VECTOR.finditer(text))
    axes = [match[1] for match in unit_vectors]
    if len(unit_vectors) < 2 or unit_vectors[-1].end() != len(text) or len(set(axes)) < len(axes):
        return None
    starts = [0, *(match.end() for match in unit_vectors[:-1])]
    factors = dict[str, str]()
    for start, match in zip(starts, unit_vectors, strict=True):
        factor = text[start : match.start()].removeprefix("+").strip()
        if _matches_outside(factor[1:], re.compile("[-+]")):
            return None
        factors[match[1]] = {"": "1", "-": "-1"}.get(factor, factor)
    return _Tuple("(", tuple(factors.get(axis, "0") for axis in ("ijk" if "k" in axes else "ij")), ")")


def _equal_forms(a: _Form, b: _Form, text_a: str, text_b: str, compare: Compare) -> bool | None:
    """Returns whether two forms are equal; `text_a` and `text_b` are what they were read from."""

    def each_equal(xs: Sequence[str], ys: Sequence[str]) -> bool | None:
        return len(xs) == len(ys) and _all(_equal_items(x, y, compare) for x, y in zip(xs, ys, strict=True))

    match a, b:
        case str(), str():
            return _equal_equations(a, b, compare)
        case _List(), _List():
            return _equal_lists(a.items, b.items, compare)
        case _Tuple(), _Tuple():
            have_same_brackets = (a.opening, a.closing) == (b.opening, b.closing) or len(a.items) > 2
            return have_same_brackets and each_equal(a.items, b.items)
        case _Matrix(), _Matrix():
            return len(a.rows) == len(b.rows) and _all(each_equal(x, y) for x, y in zip(a.rows, b.rows, strict=True))
        case _Bindings(), _Bindings():
            names = [[name for name, _ in side.values] for side in (a, b)]
            return names[0] == names[1] and each_equal([v for _, v in a.values], [v for _, v in b.values])
        case _Region(), _Region():
            names_differ = None not in (a.name, b.name) and a.name != b.name
            return not names_differ and _equal_regions(a, b, compare)
        case (_Region(), _Tuple()) | (_Tuple(), _Region()):
            region_a, region_b = (side if isinstance(side, _Region) else _as_region(side) for side in (a, b))
            return region_a is not None and region_b is not None and _equal_regions(region_a, region_b, compare)
        case (_Tuple(), _Matrix()) | (_Matrix(), _Tuple()) | (_Tuple(), _Bindings()) | (_Bindings(), _Tuple()):
            return each_equal(*(_values_in_order(side) for side in (a, b)))
        case (_List(), _Bindings()) | (_Bindings(), _List()):
            return each_equal(*(_values_in_order(side) for side in (a, b)))
        case (_List(), _Tuple()) | (_Tuple(), _List()):
            point = a if isinstance(a, _Tuple) else b
            text = text_a if isinstance(a, _List) else text_b
            is_round = isinstance(point, _Tuple) and (point.opening, point.closing) == ("(", ")")
            return is_round and not text.startswith("\\{") and each_equal(*(_values_in_order(side) for side in (a, b)))
        case (str(text), _Matrix() | _Region()) | (_Matrix() | _Region(), str(text)):
            return None if "\\" in text or "=" in text else False  # a product, a difference of sets
        case (str(text), _Tuple()) | (_Tuple(), str(text)):
            sides = _split_outside(text, _EQUALS)
            if len(sides) == 1:
                return None if "\\" in text else False
            if a is text:  # (x,y) = (1,2)
                return _equal_forms(read_form(sides[-1]), b, sides[-1], text_b, compare)
            return _equal_forms(a, read_form(sides[-1]), text_a, sides[-1], compare)
        case (str(text), _List()) | (_List(), str(text)):
            return None if re.search(r"\\(?:set|mid|cup|cap|in(?![a-z]))|:", text) else False
        case _:
            return False


def _values_in_order(side: _Form) -> list[str]:
    match side:
        case _Tuple(items=items) | _List(items=items):
            return list(items)
        case _Bindings(values=values):
            return [value for _, value in values]
        case _Matrix(rows=rows):
            return list(rows[0]) if len(rows) == 1 else [row[0] for row in rows if len(row) == 1]
        case _:
            return []


def _equal_items(a: str, b: str, compare: Compare) -> bool | None:
    return True if a == b else _equal_forms(read_form(a), read_form(b), a, b, compare)


def _equal_lists(items_a: Sequence[str], items_b: Sequence[str], compare: Compare) -> bool | None:
    """Returns whether two lists have the same items, in any order."""
    if len(items_a) != len(items_b):
        return False
    unmatched_b, unmatched_a = list(items_b), list[str]()
    for item in items_a:
        if item in unmatched_b:
            unmatched_b.remove(item)
        else:
            unmatched_a.append(item)
    if len(unmatched_a) > _MOST_ITEMS:
        return _all(_equal_items(x, y, compare) for x, y in zip(items_a, items_b, strict=True))
    return _equal_sets(unmatched_a, unmatched_b, lambda x, y: _equal_items(x, y, compare))


def _equal_sets(xs: Sequence[_T], ys: Sequence[_T], are_equal: Callable[[_T, _T], bool | None]) -> bool | None:
    """Returns whether the items of two lists can be paired so that all pairs are equal; None: undecided."""
    candidates, is_unsure = list(ys), False
    for item in xs:
        verdicts = [are_equal(item, candidate) for candidate in candidates]
        if True in verdicts:
            candidates.pop(verdicts.index(True))
        elif None in verdicts:
            is_unsure = True
        else:
            return False
    return None if is_unsure else True


def _equal_regions(a: _Region, b: _Region, compare: Compare) -> bool | None:
    def equal_intervals(x: _NumberInterval, y: _NumberInterval) -> bool | None:
        if (x.open_low, x.open_high) != (y.open_low, y.open_high):
            return False
        return _all([_equal_items(x.low, y.low, compare), _equal_items(x.high, y.high, compare)])

    if len(a.intervals) != len(b.intervals) or len(a.intervals) > _MOST_ITEMS:
        return False
    return _equal_sets(a.intervals, b.intervals, equal_intervals)


def _equal_equations(text_a: str, text_b: str, compare: Compare) -> bool | None:
    """Returns whether two texts without a form are equal, where `x = 2 + 5 = 7` stands for its last side, 7."""
    sides_a, sides_b = (_split_outside(text, _EQUALS) for text in (text_a, text_b))
    if len(sides_a) == 1 and len(sides_b) == 1:
        return compare(text_a, text_b)
    if len(sides_a) > 1 and len(sides_b) > 1:
        if sides_a[0] == sides_b[0]:
            return _equal_items(sides_a[-1], sides_b[-1], compare)
        return compare(text_a, text_b)
    sides, single_side, chain = (sides_a, text_b, text_a) if len(sides_a) > 1 else (sides_b, text_a, text_b)
    exact_sides = sides[: max(1, len(_split_outside(_EXACT_PART.split(chain)[0], _EQUALS)))]
    numbers = {value[0] for side in exact_sides if (value := read_value(side)) is not None and not value[1]}
    if len(numbers) > 1:
        return False  # 3 = 4
    if len(sides) == 2 and not _LEFT_SIDE.fullmatch(sides[0]) and sides is sides_b:
        return compare(text_a, text_b)  # an equation is asked for
    last_side = exact_sides[-1]
    if len(exact_sides) > 1 and _IS_NAME.fullmatch(last_side) and not _IS_NAME.fullmatch(single_side):
        last_side = exact_sides[0]  # 7 = x
    pair = (last_side, single_side) if sides is sides_a else (single_side, last_side)
    return _equal_items(_without_label(pair[0]), _without_label(pair[1]), compare)


_EXACT_PART = re.compile(r"\\approx(?![a-z])|≈")


def _same_choice(text_a: str, text_b: str) -> bool | None:
    """Returns whether two choices (`(B)`, `B. 12`, `option B`) have the same letter; None unless both are choices."""
    choices = [_CHOICE.fullmatch(_TEXT.sub(r"\1", text).strip()) for text in (text_a, text_b)]
    if choices[0] is None or choices[1] is None:
        return None
    letters = [match[1] or match[2] or match[3] for match in choices if match is not None]
    choice_texts = [match[4].strip() for match in choices if match is not None]
    if not all(letter.isupper() for letter in letters):
        return None
    if any(text and (not re.search(r"[A-Za-z]{2}|\d", text) or _ITEMS.match(text)) for text in choice_texts):
        return None
    return letters[0] == letters[1] and (not all(choice_texts) or choice_texts[0] == choice_texts[1])


def _same_clock(a: re.Match[str], b: re.Match[str]) -> bool:
    halves = {match[3].lower() for match in (a, b) if match[3]}
    return (int(a[1]), a[2]) == (int(b[1]), b[2]) and len(halves) < 2


def _turning_words(text: str) -> set[str]:
    return {word for match in _WORD.findall(text) if (word := match.lower()) in _TURNING_WORDS}


def _without_label(text: str) -> str:
    r"""Returns the text without `\text{The answer is}`, `Answer:` or the like before it."""
    match = _LABEL.match(text)
    if match is None or match.end() == len(text) or _turning_words(match[0]):
        return text
    content = text[match.end() :].strip()
    return content.removesuffix("}").strip() if content.count("}") > content.count("{") and "{" in match[0] else content


def _join_thousands(text: str) -> str:
    """Returns the text with its thousands joined; what is between brackets is a list."""
    return _GROUPED_THOUSANDS.sub(lambda m: m[1].replace(",", ""), text)


def _split_brackets(text: str) -> tuple[str, str, str] | None:
    """Returns the opening bracket, the inside and the closing bracket of a text that one pair of brackets holds."""
    opening = next((sign for sign in ("\\{", "(", "[") if text.startswith(sign)), None)
    closing = next((sign for sign in ("\\}", ")", "]") if text.endswith(sign)), None)
    if opening is None or closing is None or (opening == "\\{") != (closing == "\\}"):
        return None
    depth = 0
    for match in _OPEN_OR_CLOSE.finditer(text):
        depth += _depth_change(match[0])
        if depth == 0 and match.end() < len(text):
            return None
    return (opening, text[len(opening) : -len(closing)].strip(), closing) if depth == 0 else None


def _depth_change(bracket: str) -> int:
    return 1 if bracket[-1] in "{([n" else -1  # of \begin, too


def _matches_outside(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Returns the matches outside of all brackets."""
    matches = list(pattern.finditer(text))
    if not matches:
        return []
    outer_matches, depth, brackets = list[re.Match[str]](), 0, _OPEN_OR_CLOSE.finditer(text)
    bracket = next(brackets, None)
    for match in matches:
        while bracket is not None and bracket.start() < match.start():
            depth += _depth_change(bracket[0])
            bracket = next(brackets, None)
        if depth == 0:
            outer_matches.append(match)
    return outer_matches


def _split_outside(text: str, separator: re.Pattern[str]) -> list[str]:
    """Returns what is between the separators that are outside of all brackets, without what is empty."""
    matches = _matches_outside(text, separator)
    spans = [(0, 0), *((m.start(), m.end()) for m in matches), (len(text), len(text))]
    parts = [text[previous[1] : following[0]].strip() for previous, following in pairwise(spans)]
    return [part for part in parts if part] if matches else [text]


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Returns False if a verdict is False, else None if one is None, else True."""
    result: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        result = result if verdict else None
    return result


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    result: bool | None = False
    for verdict in verdicts:
        if verdict:
            return True
        result = result if verdict is False else None
    return result
