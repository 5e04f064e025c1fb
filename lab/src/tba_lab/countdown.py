"""Countdown with several solutions: reach a target with given digits, each used once, by any right expression.

`23579=16:` is answered by `9+7+5-2-3`, `7-2+5+9-3` or any other of its right answers; every problem has at least
`least_answers` of them. So a policy can be right in one way or in many, and accuracy alone does not show which.

Invariant: a digest of digits and target decides the split, so training and evaluation never share a problem; the
demonstrations of a problem's right answers are drawn evenly over all of them.

Demonstrations can contain mistakes (`wrong_operations`), as in `arithmetic`; the reward is always right.

An answer is right if it uses each digit once and has the target as its value, however it is written; two texts are two
answers. Nothing is evaluated as code.

The recipe's base (0.45 M parameters, made on the first run and cached) was trained on answers drawn evenly from all
right ones, and then on demonstrations of which one in seven is wrong. RL can then make it right more often in many ways
or in few: `tba-lab study diversity` measures which.

Shape legend: S sets of digits, N digits of each, F forms (an order of the digits and the operations between them).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.evaluation.accuracy import EvaluationSettings
from tba.fields import as_declared
from tba.models.huggingface import HuggingFace
from tba.models.warm_start import Lesson, WarmStart
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed
from tba.schedules import Constant, WarmupStableDecay
from tba.tasks.held_out import check_share, is_held_out
from tba.training.optimizer import OptimizerSettings
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel
from tba.types import Completion, Judgement, Problem, Prompt, Split

_EXPRESSION = re.compile(r"[0-9](?:[+*-][0-9])*")
_TERM = re.compile(r"([+-]?)([0-9*]+)")


def value_of(text: str) -> int | None:
    """Returns the value of digits joined by + - *, products first, such as `7+2*3-5`; None for any other text."""
    if _EXPRESSION.fullmatch(text) is None:
        return None
    terms = [(sign, math.prod(map(int, digits.split("*")))) for sign, digits in _TERM.findall(text)]
    return sum(-value if sign == "-" else value for sign, value in terms)


@dataclass(frozen=True)
class Expression:
    """1 if the completion uses each of the prompt's `digits` once and has its `target` as value, else 0.

    `operations` are those that it may use.
    """

    operations: str = "+-*"

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` for a prompt without these fields."""
        return [Judgement(float(self._is_right(p, c.text))) for p, c in answered]

    def _is_right(self, prompt: Prompt, text: str) -> bool:
        try:
            digits, target = prompt.fields["digits"], prompt.fields["target"]
        except KeyError as error:
            raise UserError(
                f"prompt {prompt.key} of task {prompt.task} has no field {error}: an expression is marked by the "
                "fields digits, as '2357', and target, as 11"
            ) from error
        digits_used, operations_used = text[::2], text[1::2]
        if len(digits_used) != len(digits):
            return False  # whatever its length, at once
        if sorted(digits_used) != sorted(digits) or not set(operations_used) <= set(self.operations):
            return False
        return value_of(text) == target


_OPERATIONS = "+-*"
_DIGITS = range(1, 10)


@dataclass(frozen=True)
@as_declared
class Countdown:
    """`DIGITS=TARGET:`, digits ascending, answered by an expression that uses each of them; products come first."""

    digits: int = 5  # how many digits a problem has, 2 to 5; each is from 1 to 9 and may be repeated
    operations: str = "+-"  # some of + - *, each used any number of times
    least_answers: int = 24  # right answers that a problem has at least, as texts: 1+2 and 2+1 are two
    largest_target: int = 99  # targets are from 1 to this
    train_problems: int = 6_000  # distinct training problems, drawn by `seed`
    eval_problems: int = 1_000  # distinct evaluation problems, none of them in training
    held_out: float = 0.15  # share of all problems reserved for evaluation
    wrong_operations: float = 0.0  # share of demonstrations with one wrong operation: a habit for RL to unlearn
    seed: int = 0  # seed of the problems drawn and of their demonstrations

    def __post_init__(self) -> None:
        if not 2 <= self.digits <= 5:
            raise UserError(f"countdown has digits {self.digits}: give a number from 2 to 5")
        if not self.operations or sorted(self.operations) != sorted(set(self.operations) & set(_OPERATIONS)):
            raise UserError(f"countdown has operations {self.operations!r}: give each of + - * at most once, as '+-'")
        if min(self.train_problems, self.eval_problems, self.least_answers) < 1:
            raise UserError(
                f"countdown has {self.train_problems} train_problems, {self.eval_problems} eval_problems and "
                f"least_answers {self.least_answers}: give at least 1 of each"
            )
        check_share(self.held_out, "countdown's held_out")
        if self.seed < 0:
            raise UserError(f"countdown's seed is {self.seed}: give a whole number from 0")
        if not 0 <= self.wrong_operations <= 1 or (self.wrong_operations and len(self.operations) < 2):
            raise UserError(
                f"countdown has wrong_operations {self.wrong_operations} with operations {self.operations!r}: give a "
                "share from 0 to 1, and two operations or more"
            )

    @property
    def name(self) -> str:
        return "countdown"

    def problems(self, split: Split) -> list[Problem]:
        """Returns distinct problems in an order fixed by `seed`. Raises `UserError` when there are not that many."""
        table = _table(self.digits, self.operations)
        all_problems = table.problems(self.least_answers, self.largest_target)
        candidates = [p for p in all_problems if self._is_in_split(split, table, *p)]
        count = self.eval_problems if split == "eval" else self.train_problems
        if len(candidates) < count:
            raise UserError(
                f"countdown has only {len(candidates)} {split} problems with these settings, {count} are asked for: "
                f"lower {split}_problems or least_answers, or raise largest_target"
            )
        rng = np.random.default_rng([self.seed, split == "eval"])
        indices = rng.permutation(len(candidates))[:count]
        return [self._problem(table, candidates[i][0], candidates[i][1], rng) for i in indices]

    def reward(self) -> Expression:
        return Expression(self.operations)

    def _is_in_split(self, split: Split, table: _Table, s: int, target: int) -> bool:
        return is_held_out(f"{table.digits_text(s)}={target}", self.held_out) == (split == "eval")

    def _problem(self, table: _Table, s: int, target: int, rng: np.random.Generator) -> Problem:
        correct_forms = np.flatnonzero(table.value_SF[s] == target)
        demonstration = table.text(s, int(rng.choice(correct_forms)))
        if rng.random() < self.wrong_operations:
            demonstration = self._with_another_operation(demonstration, rng)
        digits = table.digits_text(s)
        return Problem(f"{digits}={target}:", {"digits": digits, "target": target}, demonstration)

    def _with_another_operation(self, text: str, rng: np.random.Generator) -> str:
        place = 1 + 2 * int(rng.integers(self.digits - 1))
        other_operations = [o for o in self.operations if o != text[place]]
        return text[:place] + other_operations[rng.integers(len(other_operations))] + text[place + 1 :]


@dataclass(frozen=True)
class _Table:
    """The values of all expressions with a given number of digits."""

    digit_SN: npt.NDArray[np.int64]  # ascending in each set
    forms: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]  # order of the digits, operations
    value_SF: npt.NDArray[np.int64]

    def digits_text(self, s: int) -> str:
        """Returns the digits of a set."""
        return "".join(map(str, self.digit_SN[s]))

    def text(self, s: int, form: int) -> str:
        """Returns the digits of a set, in one of the forms, as an expression."""
        order, operations = self.forms[form]
        first_digit, *other_digits = self.digit_SN[s, list(order)]
        return f"{first_digit}" + "".join(f"{o}{digit}" for o, digit in zip(operations, other_digits, strict=True))

    def problems(self, least_texts: int, largest: int) -> list[tuple[int, int]]:
        """Returns (set, target) of problems with `least_texts` right texts or more; equal digits make equal texts."""
        problems = []
        for s, value_F in enumerate(self.value_SF):
            _, repeats = np.unique(self.digit_SN[s], return_counts=True)
            forms_per_text = math.prod(math.factorial(n) for n in repeats)  # forms of one text
            targets, counts = np.unique(value_F[(value_F >= 1) & (value_F <= largest)], return_counts=True)
            least_forms = least_texts * forms_per_text
            problems += [(s, int(t)) for t, count in zip(targets, counts, strict=True) if count >= least_forms]
        return problems


@functools.cache
def _table(digits: int, operations: str) -> _Table:
    digit_SN = np.array(list(itertools.combinations_with_replacement(_DIGITS, digits)))
    orders = itertools.permutations(range(digits))
    forms = tuple(itertools.product(orders, itertools.product(operations, repeat=digits - 1)))
    value_SF = np.stack([_value_S(digit_SN[:, order], operations_) for order, operations_ in forms], axis=1)
    return _Table(digit_SN, forms, value_SF)


def _value_S(digit_SN: npt.NDArray[np.int64], operations: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Returns the value of each row's digits with these operations between them, products first."""
    total_S, term_S = np.zeros_like(digit_SN[:, 0]), digit_SN[:, 0]
    for n, operation in enumerate(operations, start=1):
        if operation == "*":
            term_S = term_S * digit_SN[:, n]
        else:
            total_S = total_S + term_S
            term_S = digit_SN[:, n] if operation == "+" else -digit_SN[:, n]
    return total_S + term_S


_LESSON_SETTINGS = SupervisedSettings(steps=300, batch_size=64, lr=2e-3, schedule="constant", pool=1)
_SCHEDULES: tuple[Literal["constant", "cosine"], ...] = ("constant", "constant", "constant", "cosine")
_CORRECT_LESSONS = tuple(
    Lesson(replace(_LESSON_SETTINGS, schedule=schedule), {"wrong_operations": 0.0, "seed": seed})
    for seed, schedule in enumerate(_SCHEDULES, start=1)  # other demonstrations in each
)

recipe = Recipe(
    name="countdown",
    description="countdown with dozens of right answers to each problem, a small base, two CPU processes, minutes",
    task=Countdown(wrong_operations=0.15),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=160, max_completion_tokens=12),
        warm_start=WarmStart(
            scratch=ScratchModel(
                hidden_size=96, layers=3, heads=4, ff_size=384, max_positions=32, tie_embeddings=False
            ),
            tokenizer="characters",
            before=_CORRECT_LESSONS,
            sft=replace(_LESSON_SETTINGS, steps=100, lr=5e-4, schedule="cosine"),
        ),
    ),
    objective=TrajectoryBalance(beta=Constant(0.05)),
    exploration=Fixed(temperature=1.0),
    optimizer=OptimizerSettings(lr=1e-4, schedule=WarmupStableDecay(10, 70, 40)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.95),
        pacing=Pacing(warm_up=280),
        buffer=BufferSettings(deduplicate=False),  # how often an answer comes up is what diversity is
    ),
    evaluation=EvaluationSettings(every=40, problems=1000, problems_during=250, greedy=False, batch_size=250),
    steps=120,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    sync_every=2,
)
