r"""Grades answers to MATH-style problems: does the last `\boxed{...}` contain the right answer, mathematically?

Invariant: every answer is graded in bounded time. Answers with the same canonical spelling (`math_text`) are right at
once; the others are compared by the package math-verify (the extra `math`), whose algebra may take forever or use all
memory, so it runs in child processes that are replaced when it does. What could not be compared is wrong, and counted.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import ascii_letters
from typing import IO, Any

from tba.errors import UserError
from tba.rewards.children import Children, claim_stdout
from tba.rewards.confined import limit_memory
from tba.rewards.exact_answer import right_answer
from tba.rewards.math_forms import equal_by_form, equal_in_words
from tba.rewards.math_text import bases_differ, canonical_words, canonicalize, last_boxed, units_differ
from tba.types import Completion, Judgement, Prompt

log = logging.getLogger("tba.reward")

_TEXT_COMMAND = re.compile(r"\s*\\(?:text|mbox|mathrm)")
_LONGEST_ANSWER = 2000  # characters of an answer that is worth comparing
_COMMAND = re.compile(r"\\(?:text\{[^{}]*\}|begin\{[a-z]*\}|end\{[a-z]*\}|[A-Za-z]+)")
_DECIMALS = 12  # to which numbers have to agree
_TINY = 1e-6
_GRACE = 1.0  # seconds between a child's own limit, which is polite, and its end


@dataclass(frozen=True)
class MathAnswer:
    """1 if the completion's boxed answer equals the prompt's field `answer`, else 0; 0 without a box.

    The part `ungraded` is 1 for an answer whose comparison took too long or crashed. Its processes are started with the
    first answer that needs them, and end with the reward, or with the process that holds it.
    """

    processes: int = 2  # that compare, each one answer at a time
    seconds: float = 5.0  # time limit of one comparison
    children: Children = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.processes < 1 or not self.seconds > 0:
            raise UserError(
                f"math answers are graded by {self.processes} processes in {self.seconds} s each: give at least 1, and "
                "seconds above 0"
            )
        command = (sys.executable, "-m", "tba.rewards.math_answer", str(self.seconds))
        object.__setattr__(self, "children", Children(command, self.processes, self.seconds + _GRACE))

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order. Raises `UserError` for a prompt that has no answer."""
        pairs = [(last_boxed(prompt.answer_in(c.text)), right_answer(prompt)) for prompt, c in answered]
        verdicts = self.grade(pairs)
        failures = sum(verdict is None for verdict in verdicts)
        if failures:
            log.warning("%d of %d math answers could not be compared in time and count as wrong", failures, len(pairs))
        return [Judgement(float(verdict or 0), {"ungraded": float(verdict is None)}) for verdict in verdicts]

    def grade(self, pairs: Sequence[tuple[str | None, str]]) -> list[bool | None]:
        """Returns whether each (boxed answer, right answer) are equal, in order; None: not compared in time."""
        verdicts = {pair: equal_without_algebra(*pair) for pair in dict.fromkeys(pairs)}
        undecided_pairs = [pair for pair, verdict in verdicts.items() if verdict is None]
        if undecided_pairs:
            require_math_verify()
            verdicts |= zip(undecided_pairs, self.children.ask([list(pair) for pair in undecided_pairs]), strict=True)
        return [verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """End the grading processes."""
        self.children.close()


def equal_without_algebra(answer: str | None, target: str) -> bool | None:
    """Returns the verdict if it needs no algebra, else None."""
    if answer is None or not answer.strip() or len(answer) > _LONGEST_ANSWER or bases_differ(answer, target):
        return False
    if answer == target or canonicalize(answer) == canonicalize(target):
        return True
    if units_differ(answer, target):
        return False
    verdict = equal_by_form(answer, target, equal_in_words)
    if verdict is None and _TEXT_COMMAND.match(target) and canonical_words(target) is not None:
        return False  # `abc` without \text may be a product
    return verdict


def equal_answers(answer: str, target: str) -> bool:
    """Returns whether the two are equal, by their forms and math-verify. It may hang: call it in a child process."""
    verdict = equal_by_form(answer, target, _equal_by_algebra)
    return _equal_by_algebra(canonicalize(answer), canonicalize(target)) if verdict is None else verdict


def _equal_by_algebra(answer: str, target: str) -> bool:
    """Returns whether math-verify takes two canonical texts for equal, if need be with i for the imaginary unit."""
    verdict = equal_in_words(answer, target)
    if verdict is not None:
        return verdict
    if _differ_in_case(answer, target):
        return False
    from math_verify import LatexExtractionConfig, parse, verify

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed_target, parsed_answer = (
        parse(f"\\boxed{{{text.replace(';', ',')}}}", extraction, parsing_timeout=None)  # our own clock is running
        for text in (target, answer)
    )
    for a, b in ((parsed_target, parsed_answer), (_make_complex(parsed_target), _make_complex(parsed_answer))):
        if verify(a, b, float_rounding=_DECIMALS, allow_set_relation_comp=True, timeout_seconds=None):
            return not _differ_though_tiny(a[0], b[0])
    return False


def _differ_in_case(text_a: str, text_b: str) -> bool:
    """Returns whether a variable is a capital in one text only (r, R): math-verify does not see it. A constant C may be
    c.
    """
    letters = [set(_COMMAND.sub("", text)) for text in (text_a, text_b)]
    return any(
        (letter in a) != (letter in b) and (letter.swapcase() in a) != (letter.swapcase() in b)
        for a, b in (letters,)
        for letter in a & set(ascii_letters) - set("cC")
    )


def _make_complex(expressions: list[Any]) -> list[Any]:
    """Returns parsed expressions with the letter i as the imaginary unit."""
    from sympy import Basic, I

    parts: list[Any] = []
    for part in expressions:
        letters = part.free_symbols if isinstance(part, Basic) else ()
        parts.append(part.subs({letter: I for letter in letters if str(letter) == "i"}) if letters else part)
    return parts


def _differ_though_tiny(a: Any, b: Any) -> bool:
    """Returns whether two different numbers are so near 0 that math-verify takes them for equal (1/2004!, 1/2005!)."""
    try:
        return bool(a.is_number and b.is_number and 0 < abs(a.evalf()) < _TINY and abs((b / a).evalf() - 1) > _TINY)
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return False  # no numbers, or none that can be compared


def require_math_verify() -> None:
    """Raises `UserError` when the package is not there."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("grading MATH answers needs the package math-verify: install it with `pip install math-verify`")


class _Expired(BaseException):
    """The time limit has expired. It is not an `Exception`, so that no library catches it on the way."""


def _expire(number: int, frame: object) -> None:
    raise _Expired


def serve(questions: IO[str], answers: IO[str], seconds: float) -> None:
    """Read answer and right answer, write whether they are equal (null: gave up), until the input ends."""
    logging.disable()  # math-verify tells of every expression that it cannot read
    signal.signal(signal.SIGALRM, _expire)
    limit_memory()
    equal_answers("x + 1", "2x")  # imports, and its own tables, before the clock matters
    print("ready", file=answers, flush=True)
    for line in questions:
        _bound_processor_seconds(seconds + 2 * _GRACE)
        verdict: bool | None = None
        number, question = json.loads(line)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            verdict = equal_answers(*question)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except _Expired:
            verdict = None
        except (MemoryError, RecursionError):
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([number, verdict]), file=answers, flush=True)


def _bound_processor_seconds(seconds: float) -> None:
    """Limit processor time from here on, so that the system ends a child that hangs after its parent has died."""
    usage, limit = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    value = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (value if limit == resource.RLIM_INFINITY else min(value, limit), limit))


def main() -> None:
    """Run as the child."""
    serve(sys.stdin, claim_stdout(), float(sys.argv[1]))


if __name__ == "__main__":
    main()
