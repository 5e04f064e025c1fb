r"""What it costs to grade an answer grows as its length does, whatever is in it: steps are counted, not seconds.

A step is a line of Python, or a character of a text whose method is called (`find`, `split`, ...). What regular
expressions do inside cannot be counted: those that see a whole answer repeat nothing that they may have to give back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from tba.apps.preference import similarity
from tba.rewards import exact_answer, math_text, number_text, units
from tba.rewards.exact_answer import ExactAnswer, ExactText
from tba.rewards.expression import Expression
from tba.rewards.math_answer import at_once
from tba.rewards.math_text import last_boxed
from tba.types import Completion, Prompt, StopReason, Version

SHORT, LONG = 10_000, 100_000
SHAPES = [
    *(
        "1",
        "a",
        " ",
        "-",
        "$",
        "=",
        "^",
        "\\",
        "{",
        "(",
        "**",
        "#### ",
        "\\boxed{",
        "\\boxed{}",
        "\\boxed 7 ",
        "\\frac{",
    ),
    *("\\text{ cm}", "1,", "1 000", "1/", "1.", "1e", "- ", "6 feet 2 inches "),
]
FIELDS = {"answer": "72", "digits": "2357", "target": 11}


def answered(text: str, **fields: object) -> list[tuple[Prompt, Completion]]:
    prompt = Prompt("t", np.array([1], dtype=np.int32), "?", {**FIELDS, **fields})
    return [(prompt, Completion(np.array([1], dtype=np.int32), text, StopReason.EOS, (Version(), Version())))]


def by_math(text: str) -> object:
    """As `MathAnswer`, up to what is left to its children."""
    return at_once(last_boxed(text), "72")


GRADERS: dict[str, Callable[[str], object]] = {
    "number": lambda text: ExactAnswer().judge(answered(text, answer="5 cm")),
    "text": lambda text: ExactAnswer().judge(answered(text, answer="Paris")),
    "strict": lambda text: ExactAnswer(strict=True).judge(answered(text)),
    "math": by_math,
    "boxed": lambda text: by_math(f"\\boxed{{{text}}}"),
    "same text": lambda text: ExactText().judge(answered(text)),
    "expression": lambda text: Expression().judge(answered(text)),
    "sentences": similarity.sentences,
}


def steps(act: Callable[[], object]) -> int:
    """Lines run, and characters of texts whose methods are called."""
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event == "c_call" and isinstance(of := getattr(argument, "__self__", None), str):
            count += len(of)

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(line)
    sys.setprofile(call)
    try:
        act()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


@pytest.mark.parametrize("name", GRADERS)
def test_ten_times_the_answer_takes_ten_times_the_steps(name: str) -> None:
    slow = {}
    for shape in SHAPES:
        short, long = (shape * (size // len(shape)) for size in (SHORT, LONG))
        few, many = (steps(partial(GRADERS[name], text)) for text in (short, long))
        if many > 11 * few + 1000:
            slow[shape] = (few, many)
    assert slow == {}


def test_a_quadratic_grader_would_be_found() -> None:
    def tails(text: str) -> list[list[str]]:
        return [text[at:].split("$") for at in range(0, len(text), 100)]

    def rescanned(text: str) -> int:
        return sum(1 for at in range(0, len(text), 100) for _ in range(at, len(text), 100))

    assert steps(lambda: tails("x" * 10_000)) > 50 * steps(lambda: tails("x" * 1000))
    assert steps(lambda: rescanned("x" * 10_000)) > 50 * steps(lambda: rescanned("x" * 1000))


def test_no_more_than_so_many_sentences_are_compared_with_each_other() -> None:
    assert len(similarity.sentences("one two three. " * 5000)) == similarity.MOST


def patterns(module: ModuleType) -> Iterator[tuple[str, re.Pattern[str]]]:
    for name, value in vars(module).items():
        if isinstance(value, re.Pattern):
            yield f"{module.__name__.rpartition('.')[2]}.{name}", value


def repeats_in_two_ways(pattern: re.Pattern[str]) -> bool:
    """Whether something is repeated without a limit and may be given back for what comes after."""
    from re import _parser  # type: ignore[attr-defined]

    def any_in(node: Any) -> bool:
        if isinstance(node, tuple) and len(node) == 2 and str(node[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
            return node[1][1] == _parser.MAXREPEAT or any_in(node[1][2])
        if isinstance(node, tuple | list | _parser.SubPattern):
            return any(any_in(part) for part in node)
        return False

    return any_in(_parser.parse(pattern.pattern, pattern.flags))


def test_regular_expressions_that_see_a_whole_answer_never_give_back() -> None:
    assert repeats_in_two_ways(re.compile(r"\s*$"))
    assert not repeats_in_two_ways(re.compile(r"(?:\s*+|a{1,9})b++"))
    seen = dict(item for module in (exact_answer, number_text, units) for item in patterns(module))
    seen |= {f"math_text.{name}": getattr(math_text, name) for name in ("_BOX", "_UNBRACED", "_BRACE")}
    assert len(seen) > 15
    assert {name for name, pattern in seen.items() if repeats_in_two_ways(pattern)} == {
        "number_text._AFTER_QUANTITY",  # of the right answer; it looks for ` - ` from its end, once
        "math_text._UNBRACED",  # gives back the full stops at a word's end; each word is looked at once
    }
