r"""Grades an answer against the right one: by exact value, or (`ExactText`) character by character.

Invariant: numbers are compared as rationals (`15.0` = `15`, and `0.3333` is not `1/3`), never as floats; any two texts
get a verdict, in time linear in their length. `number_text` defines what counts as one number.

Where the answer is looked for in a response:

1. *Strict*: after the last `####`, on its line or on the next line with text, and nowhere else.
2. Otherwise where the response itself marks its answer: `\boxed{...}`, `<answer>...</answer>` or `#### ...`, whichever
   comes last. An empty mark is ignored, and so is a heading such as `#### Step 2`.
3. Without a mark, after the last `answer is` or `Answer:`, if its sentence is nothing but an answer that nothing later
   takes back; else the last number of the text.

In a marked place the first number counts, if it is one of its own and not part of a list, a range or a formula; of an
equation, what follows its last `=`. If both answers name a unit of measurement (`units`), the units must agree: `5 cm`
is not 5 inches. Either may leave it out. A place, or a short response, that is a number in English words
(`number_words`) is that number: `The answer is twenty-five.`

A right answer that is not one number (`Paris`, `(5, \infty)`, `3!`) is compared as text and by its form (`math_forms`,
without algebra): the marked place or the announced answer must equal it, or (without either) the response must end with
it. Case, spacing, quotes, emphasis and closing punctuation are ignored. A choice (`B`) may have its text (`B) 12`).
"""

# ruff: noqa: RUF001  (signs as answers have them, many of which look like others)
from __future__ import annotations

import functools
import re
import unicodedata
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from tba.errors import UserError
from tba.fields import as_declared
from tba.rewards.math_forms import equal_by_form, equal_in_words, equal_values
from tba.rewards.math_text import boxed_span
from tba.rewards.number_text import UNKNOWN, Quantity, amounts, quantity, to_plain_text
from tba.rewards.number_words import cardinal, ordinal
from tba.rewards.units import differ
from tba.types import Completion, Judgement, Prompt

MARK = "####"
_HEADING = re.compile(r"[\s*_]*+(?>(?:[0-9]++[.):]\s++)?)[A-Za-z]")
_LETTER_OR_DIGIT = re.compile(r"[A-Za-z]|[0-9]")
_LEAD_IN = re.compile(r"(?:answer[*_ ]*+(?:(?:is|would be|=)(?![A-Za-z])|:)|答案[是为為:：])[*_ ]*+:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[。！？\n]")
_RETRACTION = re.compile(
    r"(?<![a-z])(?:wait|no(?=[,.:;!])|actually|sorry|correction|mistake|instead|rather|should|however|oops|scratch"
    r"|(?:that|this|it)(?:['’]s| is| was) (?:wrong|not|incorrect))(?![a-z])",
    re.IGNORECASE,
)
_FORMATTING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|left|right|displaystyle|boxed)(?![A-Za-z])|\\[,!;: ]")
_AROUND_SYMBOL = re.compile(r" ?([!-/:-@\[-`{-~]) ?")
_EDGE_SIGNS = " .,;:?*_`'\"$#。"
_LOOSE_EDGE_SIGNS = _EDGE_SIGNS + "!()[]{}"  # of a right answer in words; those of `[0,1)` and `3!` are part of it
_WORDS_ONLY = re.compile(r"[^0-9,^\\]*+")
_BEFORE_ANSWER = frozenset(" :=.!?\"'*_`$([{>—：。是")
_LONGEST_LABEL = 60  # characters that may stand before or after an answer in its place
_LONGEST_FORM = 300  # characters of a place that is compared by its form
_CONTEXT_LENGTH = 24  # characters before a number that say what it belongs to
_DENIAL = re.compile(r"(?:\bnot|n['’]t|\bnor|\bneither)[\s\"'*_$(]*$", re.IGNORECASE)
_OR = re.compile(r"\bor[\s$*_]*$")
_ONE_OF_TWO = re.compile(r"[0-9][^.;\n]{0,12}\bor[\s$*_]*$", re.IGNORECASE)
_COMPARISON = re.compile(r"(?:[0-9A-Za-z)}\]]\s*[<>]|[≤≥≠±^√])\s*\$?\s*$")
_POINT = re.compile(r"[ $\n]{0,9}[(\[][^()\[\]]{1,300}[)\]][ $.\n]{0,9}")
_FUNCTION_CALL = re.compile(r"\b(?:log|ln|exp|sin|cos|tan)\s?\($")
_FURTHER_CLAUSE = re.compile(r",(?![0-9]{3})|;|\b(?:and|or|where|with|if|when|for|since|because)\b", re.IGNORECASE)
_MINUS_WORD = re.compile(r"(?<![0-9] )\b(?:negative|minus) $", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z_]{1,20}>\s*$")
_BEFORE_ONE = re.compile(r"(?:^|[A-Za-z]{2}[\s:.,;]*|[:.,;≈~。：\u3000-\u9fff]|\b[aA]\s)[\s({\[*'\"`~$€£¥₹_-]*$")
_AFTER_ONE = re.compile(
    rf"""[ ]?\*[ ]?(?=[0-9(]) | _\{{?[0-9] | [\s){{}}\]*'"`$_~]*+(?:
        [+×·*^<>≤≥≠±√π|:!={UNKNOWN}] | /(?![A-Za-z]{{3}}) | -\s?(?![A-Za-z]{{2}}|\s)
      | (?:[,;&]|and\b|or\b|to\b)[\s$(\[{{}}]*+(?:[-+]?[0-9.]|[{UNKNOWN}√]|[A-Za-z](?![A-Za-z]))
      | (?![aAI]\s[A-Za-z])[A-Za-z](?![A-Za-z'.)]) )""",
    re.VERBOSE,
)
_DIGIT = re.compile(r"[0-9]")
_GLUED_VARIABLE = re.compile(r"[A-Za-z](?![A-Za-z])|[√π]")


def grade(response: str, answer: str, strict: bool = False) -> bool:
    """Returns whether `response` gives `answer`. Never raises, whatever the texts."""
    place = _after_mark(response) if strict else _last_mark(response)
    target, (number, place_number) = _target_quantity(answer), _target_in_words(answer)
    if target is None and number is None and place_number is None:
        return _same_text(place, response, answer, strict)
    candidate = _candidate(place, response, strict)
    if place_number is not None and ordinal(candidate) == place_number:
        return True
    if target is None:
        return _same_text(place, response, answer, strict) or (
            number is not None and grade(response, str(number), strict)
        )
    if not _DIGIT.search(candidate) and (number := cardinal(candidate)) is not None:
        return number == target.value
    if place is not None and (strict or not place.heading):
        amount = _amount_in_mark(to_plain_text(place.text))
    elif strict:
        amount = None
    else:
        amount = quantity(to_plain_text(candidate)) if len(candidate) < len(response) else None
        amount = amount or _last_amount(to_plain_text(response))
    if amount is None or amount.value is None or target.value is None or differ(amount.unit, target.unit):
        return False
    return equal_values((amount.value, amount.unit == "percent"), (target.value, target.unit == "percent"))


@functools.lru_cache(4096)
def _target_quantity(answer: str) -> Quantity | None:
    return quantity(to_plain_text(answer))


@functools.lru_cache(4096)
def _target_in_words(answer: str) -> tuple[Fraction | None, int | None]:
    """Returns the number that a right answer says in words, and the place that it names."""
    return cardinal(answer), ordinal(answer)


@dataclass(frozen=True)
@as_declared
class ExactAnswer:
    """1 if the completion gives the prompt's field `answer`, else 0 (the paper's reward on GSM8K)."""

    strict: bool = False  # read only what follows the last ####, as VinePPO and async_rlhf grade GSM8K

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` for a prompt that has no such field."""
        return [Judgement(float(grade(p.answer_in(c.text), right_answer(p), self.strict))) for p, c in answered]


@dataclass(frozen=True)
class ExactText:
    """1 if the completion's text equals the prompt's field `answer`, character by character, else 0."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` for a prompt that has no such field."""
        return [Judgement(float(p.answer_in(c.text) == right_answer(p))) for p, c in answered]


def right_answer(prompt: Prompt) -> str:
    """Returns the prompt's field `answer` as text. Raises `UserError` when it is missing or neither text nor number."""
    answer = prompt.fields.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or str(answer).strip() == "":
        raise UserError(
            f"prompt {prompt.key} of task {prompt.task} has {answer!r} as its field 'answer', but exact answers are "
            "graded against a text or a number: give every problem one, or give the task another reward"
        )
    return str(answer)


def marked_answer(text: str) -> str | None:
    r"""Returns the answer that a worked solution marks, after its last `####` or in its only `\boxed{}`; None: none."""
    place = _after_mark(text)
    if place is None and text.count("\\boxed") == 1 and (boxed := boxed_span(text)):
        return text[slice(*boxed)].strip() or None
    return None if place is None or place.heading else place.text


def _candidate(place: _MarkedText | None, response: str, strict: bool) -> str:
    """Returns the text that may be an answer as a whole: that of the mark, the announced one, or a short response."""
    if place is not None and (strict or not place.heading):
        return place.text
    sentence = None if strict else _announced_answer(response)
    return sentence if sentence is not None else "" if strict or len(response) > _LONGEST_FORM else response


class _MarkedText(NamedTuple):
    """The text at a mark, never empty, and whether it may be a mere heading."""

    text: str
    heading: bool


def _last_mark(response: str) -> _MarkedText | None:
    """Returns the last mark of any kind that has a text; None if there is none."""
    places = [(response.rfind(MARK), _after_mark(response)), _last_tag(response)]
    if (boxed := boxed_span(response)) and (text := response[slice(*boxed)].strip()):
        places.append((boxed[0], _MarkedText(text, heading=False)))
    marked_places = [(position, place) for position, place in places if place is not None]
    return max(marked_places, key=lambda entry: entry[0])[1] if marked_places else None


def _after_mark(response: str) -> _MarkedText | None:
    _, mark, text_behind = response.rpartition(MARK)
    text = text_behind.strip().partition("\n")[0] if mark else ""
    return _MarkedText(text, bool(_HEADING.match(text))) if text else None


def _last_tag(response: str) -> tuple[int, _MarkedText | None]:
    position = response.rfind("<answer>")
    text = response[position + len("<answer>") :].partition("</answer>")[0].strip() if position >= 0 else ""
    return position, (_MarkedText(text, heading=False) if text else None)


def _announced_answer(response: str) -> str | None:
    """Returns what the last `answer is` or `Answer:` says up to the end of its sentence, unless it is taken back."""
    announcements = deque(_LEAD_IN.finditer(response), maxlen=1)
    if not announcements:
        return None
    start = announcements[0].end()
    while response[start : start + 1].isspace():
        start += 1
    end = _SENTENCE_END.search(response, start)
    sentence, remainder = (response[start : end.start()], response[end.end() :]) if end else (response[start:], "")
    return None if _RETRACTION.search(remainder) else sentence.strip()


def _amount_in_mark(place: str) -> Quantity | None:
    lhs, equals, rhs = place.rpartition("=")
    kinds = {"letter" if m[0].isalpha() else "digit" for m in _LETTER_OR_DIGIT.finditer(lhs)}
    if equals and kinds != {"letter", "digit"}:  # `x = 72` and `6 * 12 = 72`, but not `72 (with x = 3)`
        place = rhs if any(c.isdigit() for c in rhs) else lhs
    elif equals and lhs.count("(") == lhs.count(")") and not _FURTHER_CLAUSE.search(lhs):  # `f(2) = 6`
        return quantity(rhs)
    quantities = amounts(place)
    amount, second_amount = next(quantities, None), next(quantities, None)
    if amount is None or (second_amount is not None and second_amount.start == amount.start):  # 1,2 is a list
        return None
    if _BEFORE_ONE.search(place[max(0, amount.start - _CONTEXT_LENGTH) : amount.start]) is None:
        return None
    lead = place[max(0, amount.start - _CONTEXT_LENGTH) : amount.start]
    denial = _DENIAL.search(lead) or _OR.search(lead) or _FUNCTION_CALL.search(lead) or _is_point(place, amount)
    return None if denial or _AFTER_ONE.match(place, amount.end) else _with_sign(amount, lead)


def _with_sign(amount: Quantity, context: str) -> Quantity:
    """Returns the amount with the sign that a word before it gives: `negative 7`."""
    if amount.value is None or _MINUS_WORD.search(context) is None:
        return amount
    return amount._replace(value=-amount.value)


def _is_point(text: str, amount: Quantity) -> bool:
    """Returns whether a number with commas is all that stands between brackets, and so may be a point: `(20,100)`."""
    return "," in text[amount.start : amount.end] and _POINT.fullmatch(text[: _LONGEST_FORM + 1]) is not None


def _last_amount(text: str) -> Quantity | None:
    """Returns the last number of a text, unless it is said not to be the answer, or is one end of a comparison."""
    amount = next(iter(deque(amounts(text), maxlen=1)), None)
    if amount is None:
        return None
    lead = text[max(0, amount.start - _CONTEXT_LENGTH) : amount.start]
    if _DENIAL.search(lead) or _ONE_OF_TWO.search(lead):
        return None
    if _COMPARISON.search(lead) and not _TAG.search(lead):
        return None
    return None if amount.unit is None and _GLUED_VARIABLE.match(text, amount.end) else _with_sign(amount, lead)


def _same_text(place: _MarkedText | None, response: str, answer: str, strict: bool) -> bool:
    edges = _LOOSE_EDGE_SIGNS if _WORDS_ONLY.fullmatch(answer) else _EDGE_SIGNS
    target = _normalize(answer, edges)
    if not target:
        return False
    if place is not None and _equals_answer(place.text, answer, edges):
        return True
    if strict or (place is not None and not place.heading):
        return False
    sentence = _announced_answer(response)
    if _equals_answer(response.strip() if sentence is None else sentence, answer, edges):
        return True
    words = _normalize(response, edges)
    start = len(words) - len(target)
    if not words.endswith(target) or (start > 0 and words[start - 1] not in _BEFORE_ANSWER):
        return False
    context = words[max(0, start - _CONTEXT_LENGTH) : start]
    return not _DENIAL.search(context) and not _OR.search(context) and not _is_one_of_several(context, target)


def _equals_answer(text: str, answer: str, edges: str) -> bool:
    """Returns whether a place's text is the answer, as words or by its form."""
    if _normalize(text, edges) == _normalize(answer, edges):
        return True
    if len(text) > 2 * len(answer) + _LONGEST_LABEL:
        return False
    return len(text) <= _LONGEST_FORM >= len(answer) and equal_by_form(text, answer, equal_in_words) is True


def _is_one_of_several(context: str, choice: str) -> bool:
    """Returns whether a choice stands last in a list of choices: `A, B` or `A and B`."""
    return len(choice) == 1 and re.search(r"(?<![a-z])[a-z](?:,| and| &)\s?$", context[-8:]) is not None


def _normalize(text: str, edges: str) -> str:
    """Returns the text without case, spacing, formatting and what is at its edges."""
    text = unicodedata.normalize("NFC", _FORMATTING.sub(" ", text).casefold())
    return _AROUND_SYMBOL.sub(lambda m: m[1], " ".join(text.split())).strip(edges)
