r"""Grades an answer against the right one: by exact value, or (`ExactText`) character by character.

Invariant: numbers are compared as rationals (`15.0` = `15`, and `0.3333` is not `1/3`), never as floats; any two texts
get a verdict, in time linear in their length. `number_text` defines what counts as one number.

Where the answer is looked for in a response:

1. *Strict*: after the last `####`, on its line or on the next line with text, and nowhere else.
2. Otherwise where the response itself marks its answer: `\boxed{...}` or `#### ...`, whichever comes last. An empty
   mark is ignored, and so is a heading such as `#### Step 2`.
3. Without a mark, the last number of the text.

In a marked place the first number counts; of an equation, what follows its last `=`. If both answers name a unit of
measurement (`units`), the units must agree: `5 cm` is not 5 inches. Either may leave it out.

A right answer that is not a number (`Paris`, `x + 1`) is compared as text: the marked place must equal it, or (without
a mark) the response must end with it. Case, spacing, quotes, emphasis and closing punctuation are ignored.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tba.errors import UserError
from tba.rewards.number_text import Amount, amounts, plain, quantity
from tba.rewards.units import differ
from tba.types import Completion, Judgement, Prompt

MARK = "####"
_BOXED_OR_BRACE = re.compile(r"\\boxed\s{0,9}\{|[{}]")
_HEADING = re.compile(r"[\s*_]*+(?>(?:[0-9]++[.):]\s++)?)[A-Za-z]")
_LETTER_OR_DIGIT = re.compile(r"[A-Za-z]|[0-9]")
_FORMATTING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|left|right|displaystyle|boxed)(?![A-Za-z])|\\[,!;: ]")
_AROUND_SYMBOL = re.compile(r" ?([^\w\s]) ?")
_EDGES = " .,;:!?*_`'\"$()[]{}#"
_BEFORE_LAST_WORDS = frozenset(" :=.!?\"'*_`$([{>—")


def grade(response: str, answer: str, strict: bool = False) -> bool:
    """Whether `response` gives `answer`. Never raises, whatever the texts."""
    place = _after_mark(response) if strict else _marked(response)
    wanted = plain(answer)
    right = quantity(wanted)
    if right is None:
        return _same_text(place, response, _words(answer), strict)
    if place is not None and (strict or not place.heading):
        given = _marked_amount(plain(place.text))
    else:
        given = None if strict else _last_amount(plain(response))
    if given is None or given.value != right:
        return False
    return not differ(given.unit, next(amounts(wanted)).unit)


@dataclass(frozen=True)
class ExactAnswer:
    """1 if the completion gives the prompt's field `answer`, else 0 (the paper's reward on GSM8K)."""

    strict: bool = False  # read only what follows the last ####, as VinePPO and async_rlhf grade GSM8K

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` for a prompt that has no such field."""
        return [Judgement(float(grade(c.text, right_answer(p), self.strict))) for p, c in answered]


@dataclass(frozen=True)
class ExactText:
    """1 if the completion's text equals the prompt's field `answer`, character by character, else 0."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` for a prompt that has no such field."""
        return [Judgement(float(c.text == right_answer(p))) for p, c in answered]


def right_answer(prompt: Prompt) -> str:
    """The prompt's field `answer` as text. Raises `UserError` when it is missing or neither text nor number."""
    answer = prompt.fields.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or str(answer).strip() == "":
        raise UserError(
            f"prompt {prompt.key} of task {prompt.task} has {answer!r} as its field 'answer', but exact answers are "
            "graded against a text or a number: give every problem one, or give the task another reward"
        )
    return str(answer)


class _Place(NamedTuple):
    """The text at a mark, never empty, and whether it may be a mere heading."""

    text: str
    heading: bool


def _marked(response: str) -> _Place | None:
    """Returns the last mark of either kind that has a text; None if there is none."""
    after, boxed = _after_mark(response), _last_boxed(response)
    if boxed is None or (after is not None and response.rfind(MARK) > boxed[0]):
        return after
    text = response[boxed[0] : boxed[1]].strip()
    return _Place(text, heading=False) if text else after


def _after_mark(response: str) -> _Place | None:
    _, mark, after = response.rpartition(MARK)
    text = after.strip().partition("\n")[0] if mark else ""
    return _Place(text, bool(_HEADING.match(text))) if text else None


def _last_boxed(response: str) -> tuple[int, int] | None:
    r"""Returns where the content of the last closed `\boxed{...}` begins and ends; braces nest."""
    found = None
    opened: list[int | None] = []
    for match in _BOXED_OR_BRACE.finditer(response):
        if match[0] != "}":
            opened.append(match.end() if match[0] != "{" else None)
        elif opened and (start := opened.pop()) is not None:
            found = (start, match.start())
    return found


def _marked_amount(place: str) -> Amount | None:
    if "√" in place or "π" in place:
        return None  # 2√3 is no rational, and neither of its digits is the answer
    left, equals, right = place.rpartition("=")
    kinds = {"letter" if m[0].isalpha() else "digit" for m in _LETTER_OR_DIGIT.finditer(left)}
    if equals and kinds != {"letter", "digit"}:  # `x = 72` and `6 * 12 = 72`, but not `72 (with x = 3)`
        place = right
    return next(amounts(place), None)


def _last_amount(text: str) -> Amount | None:
    last = deque(amounts(text), maxlen=1)
    return last[0] if last else None


def _same_text(place: _Place | None, response: str, wanted: str, strict: bool) -> bool:
    if not wanted:
        return False
    if place is not None and _words(place.text) == wanted:
        return True
    if strict or (place is not None and not place.heading):
        return False
    given = _words(response)
    before = len(given) - len(wanted)
    return given.endswith(wanted) and (before == 0 or given[before - 1] in _BEFORE_LAST_WORDS)


def _words(text: str) -> str:
    """Returns the text without case, spacing, formatting and punctuation at its edges."""
    text = " ".join(_FORMATTING.sub(" ", text).casefold().split())
    return _AROUND_SYMBOL.sub(lambda m: m[1], text).strip(_EDGES)
