r"""What it costs to grade an answer grows as its length does, whatever is in it: steps are counted, not seconds.

A step is a line of Python, or a character of a text whose method is called (`find`, `split`, ...). What regular
expressions do inside cannot be counted: those that see a whole answer repeat nothing that they may have to give back.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from re import _parser  # the tree of an expression: nothing public gives it
from types import FrameType, ModuleType
from typing import Any

import numpy as np

import tba
from tba.apps.preference import similarity
from tba.rewards import exact_answer, ifeval, instructions, math_text, number_text, units
from tba.rewards.exact_answer import ExactAnswer, ExactText
from tba.rewards.ifeval import IfEvalReward
from tba.rewards.instructions import ShareFulfilled
from tba.rewards.math_answer import equal_without_algebra
from tba.rewards.math_text import last_boxed
from tba.types import Completion, Prompt, StopReason, Version

SIZES = (2_000, 20_000)  # characters: MATH's answers are read up to 2,000
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
    *("\\frac", "\\frac1", "\\frac{1", "\\frac{1}{", "\\frac12", "{\\frac", "1\\overline{", "~"),
    *("\n", "[", "<<", "* ", "\n1. a", "p.s"),
]
INSTRUCTIONS = {
    "numbered_list": {"items": 2},
    "title_case": {},
    "parentheses": {},
    "sentences": {"count": 2},
    "hashtags": {"count": 1},
}
CHECKED = {
    "detectable_content:number_placeholders": {"num_placeholders": 1},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:title": {},
}
FIELDS = {
    "answer": "72",
    "digits": "2357",
    "target": 11,
    "question": "?",
    "instructions": [{"kind": kind, "arguments": given} for kind, given in INSTRUCTIONS.items()],
    "instruction_id_list": list(CHECKED),
    "kwargs": list(CHECKED.values()),
}


def answered(text: str, **fields: object) -> list[tuple[Prompt, Completion]]:
    prompt = Prompt("t", np.array([1], dtype=np.int32), "?", {**FIELDS, **fields})
    return [(prompt, Completion(np.array([1], dtype=np.int32), text, StopReason.EOS, (Version(), Version())))]


def by_math(text: str) -> object:
    """As `MathAnswer`, up to what is left to its children."""
    return equal_without_algebra(last_boxed(text), "72")


GRADERS: dict[str, Callable[[str], object]] = {
    "number": lambda text: ExactAnswer().judge(answered(text, answer="5 cm")),
    "text": lambda text: ExactAnswer().judge(answered(text, answer="Paris")),
    "strict": lambda text: ExactAnswer(strict=True).judge(answered(text)),
    "math": by_math,
    "boxed": lambda text: by_math(f"\\boxed{{{text}}}"),
    "box": lambda text: equal_without_algebra(text, r"\frac{1}{2}\text{ cm}"),
    "instructions": lambda text: ShareFulfilled().judge(answered(text)),
    "ifeval": lambda text: IfEvalReward().judge(answered(text)),
    "same text": lambda text: ExactText().judge(answered(text)),
    "sentences": similarity.split_sentences,
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


def test_ten_times_the_answer_takes_ten_times_the_steps() -> None:
    slow = {}
    for name, grader in GRADERS.items():
        for shape in SHAPES:
            short, long = (shape * (size // len(shape)) for size in SIZES)
            few, many = (steps(partial(grader, text)) for text in (short, long))
            if many > 11 * few + 1000:
                slow[name, shape] = (few, many)
    assert slow == {}


def test_fractions_in_one_another_take_linear_time() -> None:
    few, many = (steps(lambda n=n: equal_without_algebra("\\frac{" * n + "1" + "}{2}" * n, "72")) for n in (20, 200))
    assert many < 11 * few


def test_a_quadratic_grader_would_be_found() -> None:
    def tails(text: str) -> list[list[str]]:
        return [text[at:].split("$") for at in range(0, len(text), 100)]

    def rescanned(text: str) -> int:
        return sum(1 for at in range(0, len(text), 100) for _ in range(at, len(text), 100))

    assert steps(lambda: tails("x" * 10_000)) > 50 * steps(lambda: tails("x" * 1000))
    assert steps(lambda: rescanned("x" * 10_000)) > 50 * steps(lambda: rescanned("x" * 1000))


def test_no_more_than_so_many_sentences_are_compared_with_each_other() -> None:
    assert len(similarity.split_sentences("one two three. " * 5000)) == similarity.MOST_SENTENCES


def patterns(module: ModuleType) -> Iterator[tuple[str, re.Pattern[str]]]:
    for name, value in vars(module).items():
        if isinstance(value, re.Pattern):
            yield f"{module.__name__.rpartition('.')[2]}.{name}", value


def repeats_in_two_ways(pattern: re.Pattern[str]) -> bool:
    """Whether something is repeated without a limit and may be given back for what comes after."""

    def any_in(node: Any) -> bool:
        if isinstance(node, tuple) and len(node) == 2 and str(node[0]) == "ATOMIC_GROUP":
            match [(str(kind), what) for kind, what in node[1]]:
                case [("MAX_REPEAT", (_, _, repeated))]:  # alone in it, and so as possessive as if it were written so
                    return any_in(repeated)
        if isinstance(node, tuple) and len(node) == 2 and str(node[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
            return node[1][1] == _parser.MAXREPEAT or any_in(node[1][2])
        if isinstance(node, tuple | list | _parser.SubPattern):
            return any(any_in(part) for part in node)
        return False

    return any_in(_parser.parse(pattern.pattern, pattern.flags))


def groups_repeated_possessively(pattern: re.Pattern[str]) -> bool:
    def any_in(node: Any) -> bool:
        if isinstance(node, tuple) and len(node) == 2 and str(node[0]) == "POSSESSIVE_REPEAT":
            return str(node[1][2][0][0]) not in ("LITERAL", "NOT_LITERAL", "IN", "ANY") or len(node[1][2]) > 1
        if isinstance(node, tuple | list | _parser.SubPattern):
            return any(any_in(part) for part in node)
        return False

    return any_in(_parser.parse(pattern.pattern, pattern.flags))


def test_no_group_is_repeated_possessively_which_python_below_3_11_5_gets_wrong() -> None:
    """`re` loses what such a group matched (CPython issue 106052; Debian 12 has 3.11.2), and not of `(?>(?:...)?)`."""
    assert groups_repeated_possessively(re.compile("(?:a?b)?+c"))
    assert groups_repeated_possessively(re.compile("(a)*+"))
    assert not groups_repeated_possessively(re.compile(r"[0-9]++(?>(?:,[0-9]++)*)b?+"))
    every = [
        (f"{info.name}.{name}", value)
        for info in pkgutil.walk_packages(tba.__path__, "tba.")
        if info.name.startswith(("tba.rewards.", "tba.tasks."))
        for name, value in vars(importlib.import_module(info.name)).items()
        if isinstance(value, re.Pattern)
    ]
    assert len(every) > 40
    assert [name for name, pattern in every if groups_repeated_possessively(pattern)] == []


def test_regular_expressions_that_see_a_whole_answer_never_give_back() -> None:
    assert repeats_in_two_ways(re.compile(r"\s*$"))
    assert not repeats_in_two_ways(re.compile(r"(?:\s*+|a{1,9})b++"))
    seen = dict(
        item for module in (exact_answer, number_text, units, instructions, ifeval) for item in patterns(module)
    )
    seen |= {f"math_text.{name}": getattr(math_text, name) for name in ("_BOX", "_UNBRACED_CONTENT", "_BRACE")}
    assert len(seen) > 15
    near = {f"exact_answer._{name}" for name in ("BEFORE_ONE", "DENIAL", "OR", "ONE_OF_TWO", "COMPARISON", "TAG")}
    assert {name for name, pattern in seen.items() if repeats_in_two_ways(pattern)} == {
        *near,  # they see the few characters before a number
        "math_text._UNBRACED_CONTENT",  # gives back the full stops at a word's end; each word is looked at once
    }
