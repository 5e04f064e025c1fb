r"""Sums in the format of MATH: a question with $...$, a worked answer in a box, graded as MATH is.

`What is $143+494$?` is answered by `736 \boxed{637}`: the digits in the order in which they are worked out, then the
sum. It is `arithmetic` with the format and the reward of `math`, so that claims about MATH can be tried in minutes.

Invariant: the reward reads the box alone; the split and careless demonstrations are those of `arithmetic`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tba.rewards.math_answer import MathAnswer
from tba.tasks.arithmetic import Arithmetic
from tba.types import Problem, Split


@dataclass(frozen=True)
class BoxedSums:
    r"""`What is $a+b$?`, answered by `\boxed{...}`. Both operands have exactly `digits` digits."""

    digits: int = 3  # digits of each operand, 1 to 9
    train_problems: int = 20_000  # distinct training problems, drawn by `seed`
    eval_problems: int = 2_000  # distinct evaluation problems, with other operand pairs
    held_out: float = 0.1  # share of operand pairs reserved for evaluation
    forgotten_carries: float = 0.0  # share of carries that demonstrations forget: a bad habit for RL to unlearn
    seed: int = 0  # seed of the problems drawn and of the carries forgotten
    graders: int = 1  # processes per searcher that compare answers
    grading_seconds: float = 5.0  # time limit of one comparison; after it the answer counts as wrong

    def __post_init__(self) -> None:
        self._sums()  # says what is wrong

    @property
    def name(self) -> str:
        return "boxed-sums"

    def problems(self, split: Split) -> list[Problem]:
        """Distinct problems in an order fixed by `seed`. Raises `UserError` when there are not that many."""
        return [_boxed_problem(problem) for problem in self._sums().problems(split)]

    def reward(self) -> MathAnswer:
        return MathAnswer(self.graders, self.grading_seconds)

    def _sums(self) -> Arithmetic:
        return Arithmetic(
            digits=self.digits,
            train_problems=self.train_problems,
            eval_problems=self.eval_problems,
            held_out=self.held_out,
            forgotten_carries=self.forgotten_carries,
            seed=self.seed,
        )


def _boxed_problem(problem: Problem) -> Problem:
    question = f"What is ${str(problem.prompt).rstrip('=')}$?"
    fields = {"question": question, "answer": str(problem.fields["answer"])[::-1]}
    return Problem(question, fields, f"{problem.demonstration} \\boxed{{{(problem.demonstration or '')[::-1]}}}")
