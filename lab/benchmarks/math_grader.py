r"""The grader of the task `math` on real problems: does it accept every right answer, and how often a wrong one?

    python lab/benchmarks/math_grader.py DIR [--limit N] [--processes 2]

DIR has test.jsonl(.gz) in the task's format (docs: `tba.tasks.math`). Five figures:

1. every right answer against itself;
2. the same by math-verify alone, without the comparison of spellings that comes before it;
3. right answers in other spellings of the same value (`respelt`);
4. right answers made wrong: a digit or the sign changed, an extra root; none may be accepted;
5. each right answer against another problem's with another spelling. Most accepted pairs are equal by chance (`1/2` and
   `0.5`); they are listed for inspection.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

from graders import by_math_verify

from tba.rewards.math_answer import MathAnswer
from tba.rewards.math_text import canonicalize, last_boxed
from tba.tasks.math import Math

RESPELT: dict[str, Callable[[str], str]] = {
    "spaces and a full stop": lambda a: " " + re.sub(r"([+=])", r" \1 ", a) + " .",
    "dollar signs": lambda a: f"${a}$",
    "dfrac for frac": lambda a: re.sub(r"\\[dt]?frac(?![a-z])", r"\\dfrac", a),
    "left and right": lambda a: re.sub(r"\)", r"\\right)", re.sub(r"\(", r"\\left(", re.sub(r"\\left|\\right", "", a))),
    "bmatrix for pmatrix": lambda a: a.replace("{pmatrix}", "{bmatrix}"),
    "x =": lambda a: a if "=" in a or "," in a or not re.search(r"\d", a) or re.search("text|<", a) else f"x = {a}",
    "decimal point": lambda a: f"{a}.0" if re.fullmatch(r"-?\d+", a) else a,
}

SPOILT: dict[str, Callable[[str], str]] = {
    "the last digit changed": lambda a: re.sub(r"\d(?=\D*$)", lambda m: str((int(m[0]) + 1) % 10), a),
    "the first digit changed": lambda a: re.sub(r"\d", lambda m: str(int(m[0]) % 9 + 1), a, count=1),
    "the sign changed": lambda a: f"-{a}" if re.fullmatch(r"\d[^-+,]*", a) and canonicalize(a) != "0" else a,
    "one more root": lambda a: f"{a}, 1234567",
}


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    problems = Math(str(arguments.folder)).problems("eval")[: arguments.limit]
    answers = [p.fields["answer"] for p in problems]
    boxed = [last_boxed(p.demonstration) if isinstance(p.demonstration, str) else None for p in problems]
    same = sum(b is not None and b.strip() == a for a, b in zip(answers, boxed, strict=True))
    print(f"{len(answers)} problems; the solution's last box is the answer, to the character, in {same}")
    reward = MathAnswer(arguments.processes)
    tell("right answers against themselves", reward.grade(list(zip(answers, answers, strict=True))), answers, answers)
    alone(answers)
    for name, change in RESPELT.items():
        changed_answers = [change(a) for a in answers]
        changed = [i for i, (a, g) in enumerate(zip(answers, changed_answers, strict=True)) if a != g]
        pairs = [(changed_answers[i], answers[i]) for i in changed]
        tell(f"respelt, {name}", reward.grade(pairs), [g for g, _ in pairs], [a for _, a in pairs])
    for name, change in SPOILT.items():
        pairs = [(change(a), a) for a in answers if change(a) != a]
        accepted = [pair for pair, mark in zip(pairs, reward.grade(pairs), strict=True) if mark]
        listed(f"spoilt, {name}", accepted, len(pairs))
    others(reward, answers)
    print(f"processes ended because of one answer: {dict(reward.children.counts)}")
    reward.close()


def tell(label: str, marks: list[bool | None], responses: list[str], right: list[str]) -> None:
    """How many of the marks are right, and which are not."""
    print(f"{label}: {sum(m is True for m in marks)} of {len(marks)} accepted", flush=True)
    wrong = [(g, a, m) for m, g, a in zip(marks, responses, right, strict=True) if m is not True]
    for g, a, mark in wrong[:40]:
        print(f"    {'not in time' if mark is None else 'refused'}: {g!r} for {a!r}")


def alone(answers: list[str]) -> None:
    """math-verify's own verdict, in this process."""
    logging.disable()
    began = time.process_time()
    marks: list[bool | None] = [by_math_verify(a, f"\\boxed{{{a}}}") for a in answers]
    seconds = time.process_time() - began
    tell(
        f"by math-verify alone ({1000 * seconds / len(answers):.1f} ms of processor time each)", marks, answers, answers
    )


def others(reward: MathAnswer, answers: list[str]) -> None:
    """Answers of other problems, drawn with a seed."""
    shuffled = random.Random(0).sample(answers, len(answers))
    pairs = [(b, a) for a, b in zip(answers, shuffled, strict=True) if canonicalize(a) != canonicalize(b)]
    accepted = [pair for pair, mark in zip(pairs, reward.grade(pairs), strict=True) if mark]
    listed("answers of other problems, other spelling", accepted, len(pairs))


def listed(label: str, accepted: list[tuple[str, str]], of: int) -> None:
    """What was accepted, pair by pair."""
    print(f"{label}: {len(accepted)} of {of} accepted", flush=True)
    for response, right in accepted[:40]:
        print(f"    accepted: {response!r} for {right!r}")


if __name__ == "__main__":
    main()
