r"""Answers to MATH-style problems by their form: lists, points, regions, matrices, equations, choices, numbers.

Invariant: what a form says is never undone by algebra (a list of two is no number, `(1,2)` is not `{1,2}`), and what
has no form is left to the caller's `leaf`. Any text of bounded length has a verdict in time linear in it, but for
lists: each item is compared with each, up to `_MOST_ITEMS`.

Texts are `canonical` (`math_text`). Two readings are tried of `81,256`: a number, and a list; `81, 256` is a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

from tba.rewards.math_text import base, canonical, words
from tba.rewards.number_words import cardinal, ordinal

Leaf = Callable[[str, str], bool | None]  # whether two texts without a form are equal; None: it cannot tell

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
_MEMBER = re.compile(rf"(?P<name>{_NAME})\\in ?(?P<set>.+)", re.DOTALL)
_BUILT = re.compile(
    rf"\\\{{ ?(?P<name>{_NAME})(?P<over>\\in ?\\mathbb\{{R\}})?(?:\\mid ?|\||:)(?P<which>.+)\\\}}", re.DOTALL
)
_ALL_REALS = re.compile(
    r"\\mathbb\{R\}|(?:the )?(?:set of )?(?:all )?(?:the )?(?:reals|reals? numbers?)|(?:all|any) reals?(?: numbers?)?"
)
_OF_REGIONS = re.compile(r"[<>]|\\(?:le|ge|ne|cup|mathbb)(?![a-z])|\breals?\b", re.IGNORECASE)
_ROWS = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
_UNIT_VECTOR = re.compile(r"\\(?:hat|vec|text)\{(?:\\(?:mathbf|text)\{)?\\?([ijk])(?:math)?\}\}?")
_LABEL = re.compile(
    r"(?:\\text\{)?[A-Za-z][A-Za-z ]{1,60}?(?: is| are| equals|:|(?<=answer)) ?(?:\}|(?=[^{}]*$)|(?=[^{}]*\{)) ?:?",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z']+")
_TURNING = {  # words that make another answer of it
    *("not", "isn't", "except", "least", "most", "more", "less", "fewer", "greater", "larger", "smaller", "over"),
    *("under", "between", "without", "nor", "neither"),
}
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer) ?)?(?:\(([A-Z])\)[.:]?|([A-Z])(?:\)|[.:](?!\d))|([A-Z])$)\s*(.*)",
    re.DOTALL | re.IGNORECASE,
)
_LETTERED = re.compile(r"^(\s*(?:\\text[a-z]*\s*\{\s*)?[A-Z])[.:](?=\}?\s)")  # B. 12
_RATIO = re.compile(r"[0-9.]+(?::[0-9.]+)+")
_NUMERAL = re.compile(r"-?[0-9.]+")
_CLOCK = re.compile(r"(?:at )?(\d{1,2}):(\d\d) ?(?:([ap])\.?m\.?)?", re.IGNORECASE)
_GROUPED = re.compile(r"(?<![\d,.(\[{])([1-9]\d{0,2}(?:,\d{3})+)(?![\d,)\]}]|\\\})")
_VALUE = re.compile(
    r"""(?P<sign>[-+]?)(?:\\\$|[£€¥₹$])?(?P<inner>-?)
        (?: (?P<whole>\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:\\frac\{(?P<top>\d{1,99})\}\{(?P<bottom>\d{1,99})\})?
          | \\frac\{(?P<over>-?\d{1,400})\}\{(?P<under>-?\d{1,400})\} )
        (?:/(?P<by>\d{1,99}))?
        (?: (?:\\times|\\cdot|[*x]) ?10\^(?:\{(?P<ten>-?\d{1,3})\}|(?P<one>\d)) | (?P<e>[eE][-+]?\d{1,3}) )?
        (?P<scale>(?:\ ?\\text\{|\ )?(?:hundred|thousand|million|billion|trillion)\}?)?
        (?P<percent>\\?%|\\text\{\\?(?:percent|%)\}|\ percent)?
        (?:\ ?\\text\{[A-Za-z .,/()²³µ-]*\}(?:\^\{?[23]\}?)?)?""",
    re.VERBOSE,
)
_NOTHING = {"\\emptyset", "no solution", "no solutions", "the empty set", "empty set"}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


@dataclass(frozen=True)
class _Several:
    """Items in any order: a list, a set, several roots."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class _Ordered:
    """Items in order between brackets: a point, an interval."""

    opening: str
    items: tuple[str, ...]
    closing: str


@dataclass(frozen=True)
class _Rows:
    """A matrix."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Named:
    """Values by name: `x=2, y=3`."""

    values: tuple[tuple[str, str], ...]  # by name


@dataclass(frozen=True)
class _Interval:
    """The numbers between two; `open_*`: without that end."""

    low: str
    open_low: bool
    high: str
    open_high: bool


@dataclass(frozen=True)
class _Region:
    """A union of intervals, and the name of what is in it, if that is said."""

    intervals: tuple[_Interval, ...]
    name: str | None


_Form = _Several | _Ordered | _Rows | _Named | _Region | str
_REALS = _Interval("-\\infty", True, "\\infty", True)


def same(given: str, wanted: str, leaf: Leaf) -> bool | None:
    """Returns whether two answers are equal by their forms; what has none is compared by `leaf`. None: it could not
    tell.
    """
    one, other = (_unlabelled(canonical(_LETTERED.sub(r"\1)", text))) for text in (given, wanted))
    if one == other or {one, other} <= _NOTHING or _same_numeral(one, other):
        return True
    in_words = any(text[:1].isalpha() and cardinal(text) is not None for text in (one, other))
    if in_words and (verdict := spelled(one, other)) is not None:
        return verdict  # before it is taken for a list: two and a half
    choice = _same_choice(one, other)
    if choice is not None:
        return choice
    if _turning(one) != _turning(other):
        return False
    clocks = [_CLOCK.fullmatch(_TEXT.sub(r"\1", text)) for text in (one, other)]
    if clocks[0] and clocks[1]:
        return _same_clock(clocks[0], clocks[1])
    if any(_RATIO.fullmatch(a) and _NUMERAL.fullmatch(b) for a, b in ((one, other), (other, one))):
        return False
    readings = [(one, other)]
    joined = (_joined(one), _joined(other))
    if joined != (one, other):
        readings.append(joined)
    return _any(_same(form(a), form(b), a, b, leaf) for a, b in readings)


def _same_numeral(one: str, other: str) -> bool:
    """Returns whether two numerals have the same digits, and one of them does not say its base: `2A_{16}` and `2A`."""
    found = base(one), base(other)
    digits = [numeral[0] if numeral else text.upper() for numeral, text in zip(found, (one, other), strict=True)]
    return found != (None, None) and digits[0] == digits[1] and (None in found or found[0] == found[1])


def spelled(one: str, other: str) -> bool | None:
    """Returns whether two canonical texts are equal as numbers or in words; None: that takes algebra."""
    if one == other:
        return True
    numbers = _number(one), _number(other)
    if numbers[0] is not None and numbers[1] is not None:
        return same_value(numbers[0], numbers[1])
    places = ordinal(one), ordinal(other)
    if None not in places:
        return places[0] == places[1]
    in_words = words(one), words(other)
    if in_words[0] is None or in_words[1] is None:
        return None
    return True if in_words[0] == in_words[1] else None


def _number(text: str) -> tuple[Fraction, bool] | None:
    """Returns `value`, also of a number in words."""
    found = value(text)
    if found is None and text[:1].isalpha() | text.startswith("\\text") and (said := cardinal(text)) is not None:
        return said, False
    return found


def value(text: str) -> tuple[Fraction, bool] | None:
    """Returns the value of a canonical numeral, fraction or mixed number, and whether it is in percent; else None."""
    match = _VALUE.fullmatch(text)
    if match is None:
        return None
    exponent = match["ten"] or match["one"]
    if match["e"]:
        if not _is_exponent(match):
            return None
        exponent = match["e"][1:]
    try:
        over, under = match["over"], match["under"]
        number = Fraction(int(over), int(under)) if over else Fraction(match["whole"])
        if match["top"]:
            number += Fraction(int(match["top"]), int(match["bottom"]))
        number /= int(match["by"] or 1)
    except ZeroDivisionError:
        return None
    if match["top"] and "." in match["whole"]:
        return None
    number *= Fraction(10) ** int(exponent or 0)
    number *= next((factor for word, factor in _SCALES.items() if word in (match["scale"] or "")), 1)
    negative = (match["sign"] == "-") != (match["inner"] == "-")
    return (-number if negative else number), match["percent"] is not None


def _is_exponent(match: re.Match[str]) -> bool:
    """Returns whether the e of `1e-3` is a program's; `2e-1` may be 2e - 1, with Euler's number."""
    signed = match["e"][1] in "+-"
    return not signed or match["whole"] == "1" or "." in match["whole"] or len(match["e"]) > 3


def same_value(given: tuple[Fraction, bool], wanted: tuple[Fraction, bool]) -> bool:
    """Returns whether two numbers, each perhaps in percent, are equal: `50\\%` and 0.5; where only one says %, 50 and
    50 too.

    Less than 1 is no number of percent that leaves out its sign: 0.35 % is not 0.35.
    """
    if given[1] == wanted[1]:
        return given[0] == wanted[0]
    if given[0] == wanted[0]:
        return wanted[1] or abs(wanted[0]) >= 1 or not wanted[0]
    return (given[0] / 100 if given[1] else given[0]) == (wanted[0] / 100 if wanted[1] else wanted[0])


def form(text: str) -> _Form:
    """Returns a canonical text's form; the text itself if it has none."""
    if match := _MEMBER.fullmatch(text):
        held = form(match["set"])
        return _Region(held.intervals, match["name"]) if isinstance(held, _Region) else held
    if region := _region(text):
        return region
    items = _split(text, _ITEMS)
    if len(items) > 1:
        return _listed(items)
    if match := _ROWS.fullmatch(text):
        rows = tuple(tuple(cell.strip() for cell in row.split("&")) for row in match[1].split("\\\\"))
        return _Rows(rows) if "\\begin" not in match[1] else text
    if vector := _vector(text):
        return vector
    if enclosed := _enclosed(text):
        opening, inside, closing = enclosed
        parts = _split(inside, _COMMA if opening != "\\{" else _ITEMS)
        if opening == "\\{":
            return text if re.search(r"\\mid|:|\|", inside) and len(parts) == 1 else _listed(parts, named=False)
        if len(parts) > 1:
            return _Ordered(opening, tuple(parts), closing)
        if (opening, closing) == ("(", ")"):
            return form(inside)
    if _PLUS_MINUS.search(text):
        name, equals, right = text.partition("=")
        if not equals or _IS_NAME.fullmatch(name):
            return _Several(tuple(_signed(right if equals else text, sign) for sign in "+-"))
    return text


def _signed(text: str, sign: str) -> str:
    text = _PLUS_MINUS.sub(sign, text).replace("\\mp", "-" if sign == "+" else "+")
    return text.removeprefix("+")


def _listed(items: Sequence[str], named: bool = True) -> _Form:
    sides = [item.split("=", 1) for item in items]
    if named and all(len(side) == 2 and _IS_NAME.fullmatch(side[0]) for side in sides):
        names = [side[0] for side in sides]
        if len(set(names)) == len(names):
            return _Named(tuple(sorted((name, right) for name, right in sides)))
        if len(set(names)) == 1:
            items = [side[1] for side in sides]
    elif named and len(sides[0]) == 2 and _IS_NAME.fullmatch(sides[0][0]) and all(len(s) == 1 for s in sides[1:]):
        items = [sides[0][1], *items[1:]]
    parts = list[str]()
    for item in items:
        spread = form(item) if _PLUS_MINUS.search(item) else item
        parts.extend(spread.items if isinstance(spread, _Several) else [item])
    return _Several(tuple(parts))


def _region(text: str) -> _Region | None:
    """Returns the numbers that inequalities, intervals joined by cups or a set's condition describe."""
    if _OF_REGIONS.search(text) is None:
        return None
    if _ALL_REALS.fullmatch(_TEXT.sub(r"\1", text).casefold().replace("\\mathbb{r}", "\\mathbb{R}")):
        return _Region((_REALS,), None)
    if match := _BUILT.fullmatch(text):
        inner = _region(match["which"])
        return inner if inner and inner.name == match["name"] else None
    cups = _split(text, _CUP)
    if len(cups) > 1:
        parts = [_region(part) or _between(form(part)) for part in cups]
    else:
        ors = _split(text, _OR)
        if len(ors) == 1:
            return _inequality(text) or _both(_split(text, _AND))
        parts = [_region(part) for part in ors]
    found = [part for part in parts if part is not None]
    names = {part.name for part in found} - {None}
    if len(found) < len(parts) or len(names) > 1:
        return None
    return _Region(tuple(i for part in found for i in part.intervals), next(iter(names), None))


def _between(interval: _Form) -> _Region | None:
    """Returns what is between the two ends of an interval."""
    if not isinstance(interval, _Ordered) or len(interval.items) != 2:
        return None
    low, high = interval.items
    return _Region((_Interval(low, interval.opening == "(", high, interval.closing == ")"),), None)


def _inequality(text: str) -> _Region | None:
    """Returns the region of `x<2`, `2\\le x`, `0<x<1` or `x\\ne2`."""
    signs = [match[0] for match in _at_top(text, _RELATION)]
    parts = _split(text, _RELATION)
    if len(parts) != len(signs) + 1 or not 1 <= len(signs) <= 2:
        return None
    at = next((i for i, part in enumerate(parts) if _IS_NAME.fullmatch(part)), None)
    if at is None or sum(_IS_NAME.fullmatch(part) is not None for part in parts) != 1:
        return None
    name = parts[at]
    if signs == ["\\ne"]:
        other = parts[1 - at]
        return _Region((_Interval("-\\infty", True, other, True), _Interval(other, True, "\\infty", True)), name)
    if len(signs) == 2 and at != 1:
        return None
    low, open_low, high, open_high = "-\\infty", True, "\\infty", True
    if "\\ne" in signs or len({sign in ("<", "\\le") for sign in signs}) > 1:
        return None  # 1 < x > 2
    for i, sign in enumerate(signs):
        left = i < at  # the sign stands left of the name
        bound = parts[i if left else i + 1]
        if (sign in ("<", "\\le")) == left:
            low, open_low = bound, sign in "<>"
        else:
            high, open_high = bound, sign in "<>"
    return _Region((_Interval(low, open_low, high, open_high),), name)


def _both(parts: Sequence[str]) -> _Region | None:
    """Returns the region of `x>1` and `x<3`."""
    found = [_inequality(part) for part in parts]
    if len(parts) != 2 or found[0] is None or found[1] is None or found[0].name != found[1].name:
        return None
    if len(found[0].intervals) + len(found[1].intervals) != 2:
        return None
    one, other = found[0].intervals[0], found[1].intervals[0]
    if one.low == "-\\infty":
        one, other = other, one
    if one.high != "\\infty" or other.low != "-\\infty":
        return None
    return _Region((_Interval(one.low, one.open_low, other.high, other.open_high),), found[0].name)


def _vector(text: str) -> _Ordered | None:
    r"""Returns `2\mathbf{i}-\mathbf{k}` as (2,0,-1)."""
    found = list(_UNIT_VECTOR.finditer(text))
    axes = [match[1] for match in found]
    if len(found) < 2 or found[-1].end() != len(text) or len(set(axes)) < len(axes):
        return None
    starts = [0, *(match.end() for match in found[:-1])]
    factors = dict[str, str]()
    for start, match in zip(starts, found, strict=True):
        factor = text[start : match.start()].removeprefix("+").strip()
        if _at_top(factor[1:], re.compile("[-+]")):
            return None
        factors[match[1]] = {"": "1", "-": "-1"}.get(factor, factor)
    dimensions = "ijk" if "k" in axes else "ij"
    return _Ordered("(", tuple(factors.get(axis, "0") for axis in dimensions), ")")


def _same(a: _Form, b: _Form, one: str, other: str, leaf: Leaf) -> bool | None:
    """Returns whether two forms are equal; `one` and `other` are their texts."""

    def each(left: Sequence[str], right: Sequence[str]) -> bool | None:
        return len(left) == len(right) and _all(_items_same(x, y, leaf) for x, y in zip(left, right, strict=True))

    match a, b:
        case str(), str():
            return _equation(a, b, leaf)
        case _Several(), _Several():
            return _matched(a.items, b.items, leaf)
        case _Ordered(), _Ordered():
            alike = (a.opening, a.closing) == (b.opening, b.closing) or len(a.items) > 2
            return alike and each(a.items, b.items)
        case _Rows(), _Rows():
            return len(a.rows) == len(b.rows) and _all(each(x, y) for x, y in zip(a.rows, b.rows, strict=True))
        case _Named(), _Named():
            names = [[name for name, _ in side.values] for side in (a, b)]
            return names[0] == names[1] and each([v for _, v in a.values], [v for _, v in b.values])
        case _Region(), _Region():
            unlike = None not in (a.name, b.name) and a.name != b.name
            return not unlike and _same_regions(a, b, leaf)
        case (_Region(), _Ordered()) | (_Ordered(), _Region()):
            left, right = (side if isinstance(side, _Region) else _between(side) for side in (a, b))
            return left is not None and right is not None and _same_regions(left, right, leaf)
        case (_Ordered(), _Rows()) | (_Rows(), _Ordered()) | (_Ordered(), _Named()) | (_Named(), _Ordered()):
            return each(*(_in_order(side) for side in (a, b)))
        case (_Several(), _Named()) | (_Named(), _Several()):
            return each(*(_in_order(side) for side in (a, b)))
        case (_Several(), _Ordered()) | (_Ordered(), _Several()):
            ordered = a if isinstance(a, _Ordered) else b
            text = one if isinstance(a, _Several) else other
            round_or_long = isinstance(ordered, _Ordered) and (ordered.opening, ordered.closing) == ("(", ")")
            return round_or_long and not text.startswith("\\{") and each(*(_in_order(side) for side in (a, b)))
        case (str(text), _Rows() | _Region()) | (_Rows() | _Region(), str(text)):
            return None if "\\" in text or "=" in text else False  # a product, a difference of sets
        case (str(text), _Ordered()) | (_Ordered(), str(text)):
            sides = _split(text, _EQUALS)
            if len(sides) == 1:
                return None if "\\" in text else False
            last = sides[-1]  # (x,y) = (1,2)
            return _same(form(last), b, last, other, leaf) if a is text else _same(a, form(last), one, last, leaf)
        case (str(text), _Several()) | (_Several(), str(text)):
            return None if re.search(r"\\(?:set|mid|cup|cap|in(?![a-z]))|:", text) else False
        case _:
            return False


def _in_order(side: _Form) -> list[str]:
    match side:
        case _Ordered(items=items) | _Several(items=items):
            return list(items)
        case _Named(values=values):
            return [value for _, value in values]
        case _Rows(rows=rows):
            return list(rows[0]) if len(rows) == 1 else [row[0] for row in rows if len(row) == 1]
        case _:
            return []


def _items_same(one: str, other: str, leaf: Leaf) -> bool | None:
    return True if one == other else _same(form(one), form(other), one, other, leaf)


def _matched(left: Sequence[str], right: Sequence[str], leaf: Leaf) -> bool | None:
    """Returns whether two lists have the same items, in any order."""
    if len(left) != len(right):
        return False
    rest, doubt = list(right), list[str]()
    for item in left:
        if item in rest:
            rest.remove(item)
        else:
            doubt.append(item)
    if len(doubt) > _MOST_ITEMS:
        return _all(_items_same(x, y, leaf) for x, y in zip(left, right, strict=True))
    return _paired(doubt, rest, lambda one, other: _items_same(one, other, leaf))


def _paired(left: Sequence[_T], right: Sequence[_T], alike: Callable[[_T, _T], bool | None]) -> bool | None:
    """Returns whether each on the left has one of its own on the right that is like it; None: it cannot be told."""
    rest, unsure = list(right), False
    for one in left:
        verdicts = [alike(one, other) for other in rest]
        if True in verdicts:
            rest.pop(verdicts.index(True))
        elif None in verdicts:
            unsure = True
        else:
            return False
    return None if unsure else True


def _same_regions(a: _Region, b: _Region, leaf: Leaf) -> bool | None:
    def alike(x: _Interval, y: _Interval) -> bool | None:
        if (x.open_low, x.open_high) != (y.open_low, y.open_high):
            return False
        return _all([_items_same(x.low, y.low, leaf), _items_same(x.high, y.high, leaf)])

    if len(a.intervals) != len(b.intervals) or len(a.intervals) > _MOST_ITEMS:
        return False
    return _paired(a.intervals, b.intervals, alike)


def _equation(one: str, other: str, leaf: Leaf) -> bool | None:
    """Compares two texts without a form of their own: `x = 2 + 5 = 7` is what its last side is."""
    left, right = (_split(text, _EQUALS) for text in (one, other))
    if len(left) == 1 and len(right) == 1:
        return leaf(one, other)
    if len(left) > 1 and len(right) > 1:
        if left[0] == right[0]:
            return _items_same(left[-1], right[-1], leaf)
        return leaf(one, other)
    sides, text, whole = (left, other, one) if len(left) > 1 else (right, one, other)
    exact = sides[: max(1, len(_split(_EXACT_PART.split(whole)[0], _EQUALS)))]
    numbers = {found[0] for side in exact if (found := value(side)) is not None and not found[1]}
    if len(numbers) > 1:
        return False  # 3 = 4
    if len(sides) == 2 and not _LEFT_SIDE.fullmatch(sides[0]) and sides is right:
        return leaf(one, other)  # an equation is asked for
    last = exact[-1]
    if len(exact) > 1 and _IS_NAME.fullmatch(last) and not _IS_NAME.fullmatch(text):
        last = exact[0]  # 7 = x
    pair = (last, text) if sides is left else (text, last)
    return _items_same(_unlabelled(pair[0]), _unlabelled(pair[1]), leaf)


_EXACT_PART = re.compile(r"\\approx(?![a-z])|≈")


def _same_choice(one: str, other: str) -> bool | None:
    """Compares `(B)`, `B. 12` and `option B` by their letters; None unless both are choices."""
    found = [_CHOICE.fullmatch(_TEXT.sub(r"\1", text).strip()) for text in (one, other)]
    if found[0] is None or found[1] is None:
        return None
    letters = [match[1] or match[2] or match[3] for match in found if match is not None]
    rests = [match[4].strip() for match in found if match is not None]
    if not all(letter.isupper() for letter in letters):
        return None
    if any(rest and (not re.search(r"[A-Za-z]{2}|\d", rest) or _ITEMS.match(rest)) for rest in rests):
        return None
    return letters[0] == letters[1] and (not all(rests) or rests[0] == rests[1])


def _same_clock(one: re.Match[str], other: re.Match[str]) -> bool:
    halves = {match[3].lower() for match in (one, other) if match[3]}
    return (int(one[1]), one[2]) == (int(other[1]), other[2]) and len(halves) < 2


def _turning(text: str) -> set[str]:
    return {word for found in _WORD.findall(text) if (word := found.lower()) in _TURNING}


def _unlabelled(text: str) -> str:
    r"""Returns the text without `\text{The answer is}`, `Answer:` or the like before it."""
    match = _LABEL.match(text)
    if match is None or match.end() == len(text) or _turning(match[0]):
        return text
    rest = text[match.end() :].strip()
    return rest.removesuffix("}").strip() if rest.count("}") > rest.count("{") and "{" in match[0] else rest


def _joined(text: str) -> str:
    """Returns the text with its thousands joined; what is between brackets is a list."""
    return _GROUPED.sub(lambda m: m[1].replace(",", ""), text)


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Returns the opening bracket, the inside and the closing bracket of a text that one pair of brackets holds."""
    opening = next((sign for sign in ("\\{", "(", "[") if text.startswith(sign)), None)
    closing = next((sign for sign in ("\\}", ")", "]") if text.endswith(sign)), None)
    if opening is None or closing is None or (opening == "\\{") != (closing == "\\}"):
        return None
    depth = 0
    for match in _OPEN_OR_CLOSE.finditer(text):
        depth += _step(match[0])
        if depth == 0 and match.end() < len(text):
            return None
    return (opening, text[len(opening) : -len(closing)].strip(), closing) if depth == 0 else None


def _step(bracket: str) -> int:
    return 1 if bracket[-1] in "{([n" else -1  # of \begin, too


def _at_top(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Returns the matches outside of all brackets."""
    matches = list(pattern.finditer(text))
    if not matches:
        return []
    found, depth, brackets = list[re.Match[str]](), 0, _OPEN_OR_CLOSE.finditer(text)
    bracket = next(brackets, None)
    for match in matches:
        while bracket is not None and bracket.start() < match.start():
            depth += _step(bracket[0])
            bracket = next(brackets, None)
        if depth == 0:
            found.append(match)
    return found


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Returns what is between the separators that are outside of all brackets, without what is empty."""
    matches = _at_top(text, separator)
    ends = [(0, 0), *((m.start(), m.end()) for m in matches), (len(text), len(text))]
    parts = [text[before[1] : after[0]].strip() for before, after in pairwise(ends)]
    return [part for part in parts if part] if matches else [text]


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Returns the verdict of all: False if one is, else None if one is."""
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
