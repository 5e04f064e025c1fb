"""SmolLM2-135M-Instruct learns to solve word problems of one or two steps, on two CPU cores.

    tba model smollm2 --out smollm2
    tba sft lab/src/tba_lab/word_problems.py --model.path smollm2 --out taught
    tba train lab/src/tba_lab/word_problems.py --model.path taught

Everyday problems of 36 templates, ten of which are never trained; the reward is 1 for the
right number. Without `--model.path` the weights are the Hub's. Needs the extra `tba-rl[lora]`, and `gguf` for the first
command. The base is right at 8 %, after the supervised part at 65 %, after reinforcement learning at 72 %
(docs/real_model.md).

Word problems of one or two steps, answered by a number: for small models, to which GSM8K is too hard.

Invariant: training and evaluation share no text, and the templates of `held_out()` are in no training problem. A
problem is a function of seed, split and its number.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, NamedTuple

from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.evaluation.accuracy import EvaluationSettings
from tba.fields import as_declared
from tba.models.huggingface import HuggingFace
from tba.models.warm_start import WarmStart
from tba.protocols import Reward
from tba.recipes.instruct import recipe as instruct
from tba.rewards.exact_answer import ExactAnswer
from tba.schedules import WarmupStableDecay
from tba.tasks.held_out import is_held_out
from tba.training.optimizer import OptimizerSettings
from tba.training.supervised import SupervisedSettings
from tba.types import Problem, Split

QUESTION_SUFFIX = " Answer with the number only."
_HELD_OUT_TEMPLATES = 10
_HELD_OUT_PROBLEMS = 0.2  # share of the other templates' problems
_NAMES = (
    *("Ana", "Ben", "Carla", "David", "Elif", "Felix", "Grace", "Hugo", "Ines", "Jamal", "Kim", "Liam", "Mina"),
    *("Nora", "Omar", "Priya", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Victor", "Wanda", "Yusuf", "Zoe"),
)
_THINGS = (
    *("apples", "marbles", "stickers", "pencils", "cookies", "shells", "books", "cards", "stamps", "eggs", "coins"),
    *("beads", "buttons", "flowers", "candles", "balloons", "oranges", "postcards"),
)


class Numbers(NamedTuple):
    """Numbers that a template draws."""

    a: int
    b: int
    c: int


class Template(NamedTuple):
    """A kind of problem. `{name}`, `{other}` and `{things}` are drawn, the rest is `shown`."""

    text: str
    solve: Callable[[Numbers], int]
    worked_answer: str  # with the same slots
    steps: int = 1
    largest_factor: int = 0  # b and c are at most this; 0: as large as a


def _sum(n: Numbers) -> int:
    return n.a + n.b


def _first_number(n: Numbers) -> int:
    return n.a  # of a + b


def _times(n: Numbers) -> int:
    return n.a * n.b


def _share(n: Numbers) -> int:
    return n.a  # a * b shared by b


def _times_and_more(n: Numbers) -> int:
    return n.a * n.b + n.c


_ADD, _LESS = "{a} + {b} = {a+b}", "{a+b} - {b} = {a}"
_MULTIPLY, _DIVIDE = "{a} * {b} = {a*b}", "{a*b} / {b} = {a}"
_MORE = "{a} * {b} = {a*b}, {a*b} + {c} = {a*b+c}"
_FEWER = "{a} * {b} = {a*b}, {a*b+c} - {a*b} = {c}"
_TWICE = "{a} + {b} = {a+b}, {a+b} + {c} = {a+b+c}"
_AFTER = "{a+b+c} - {b} = {a+c}, {a+c} - {c} = {a}"
_SHARED = "{a*b-c} + {c} = {a*b}, {a*b} / {b} = {a}"
_PRICE = "{a} * {b} = {a*b}, {a} * {c} = {a*c}, {a*b} + {a*c} = {a*b+a*c}"

TEMPLATES = (
    Template("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", _sum, _ADD),
    Template("There are {a} {things} in one box and {b} in another. How many are there in all?", _sum, _ADD),
    Template("{name} read {a} pages on Monday and {b} on Tuesday. How many pages is that together?", _sum, _ADD),
    Template("A bus has {a} passengers, and {b} get on. How many passengers are there now?", _sum, _ADD),
    Template("{name} is {a} years old. How old will {name} be in {b} years?", _sum, _ADD),
    Template("{name} has {b} {things} more than {other}, who has {a}. How many does {name} have?", _sum, _ADD),
    Template("It was {a} degrees in the morning and got {b} degrees warmer. How many degrees is it now?", _sum, _ADD),
    Template("{name} had {a+b} {things} and gave {b} to {other}. How many {things} are left?", _first_number, _LESS),
    Template("{name} wants to collect {a+b} {things} and has {b}. How many are missing?", _first_number, _LESS),
    Template("A rope is {a+b} metres long. {b} metres are cut off. How many metres are left?", _first_number, _LESS),
    Template("Of {a+b} pupils, {b} are ill today. How many are at school?", _first_number, _LESS),
    Template("{name} has {a+b} dollars and pays {b} for lunch. How many dollars are left?", _first_number, _LESS),
    Template("A book has {a+b} pages. {name} has read {b}. How many pages are left to read?", _first_number, _LESS),
    Template("{name} has {a+b} {things}, {other} has {b}. How many more does {name} have?", _first_number, _LESS),
    Template("{name} has {a} bags with {b} {things} each. How many {things} is that?", _times, _MULTIPLY, 1, 9),
    Template("A ticket costs {a} dollars. How much do {b} tickets cost?", _times, _MULTIPLY, 1, 9),
    Template("{name} runs {a} kilometres every day. How many kilometres is that in {b} days?", _times, _MULTIPLY, 1, 9),
    Template("A hall has {a} rows of {b} seats. How many seats does it have?", _times, _MULTIPLY, 1, 9),
    Template("One box holds {a} {things}. How many {things} do {b} boxes hold?", _times, _MULTIPLY, 1, 9),
    Template("{name} earns {a} dollars an hour. How many dollars is that in {b} hours?", _times, _MULTIPLY, 1, 9),
    Template("{name} shares {a*b} {things} evenly among {b} friends. How many does each get?", _share, _DIVIDE, 1, 9),
    Template("{a*b} {things} are packed into {b} equal boxes. How many are in each box?", _share, _DIVIDE, 1, 9),
    Template("{b} identical pens cost {a*b} dollars. How much does one pen cost?", _share, _DIVIDE, 1, 9),
    Template(
        "{name} walks {a*b} kilometres in {b} equal stages. How many kilometres is a stage?", _share, _DIVIDE, 1, 9
    ),
    Template(
        "{name} buys {a} packs of {b} {things} and finds {c} more. How many {things} does {name} have?",
        *(_times_and_more, _MORE, 2, 9),
    ),
    Template(
        "A taxi costs {c} dollars and {a} more for each kilometre. What do {b} kilometres cost?",
        *(_times_and_more, _MORE, 2, 9),
    ),
    Template(
        "{name} had {c} dollars and saves {a} a week for {b} weeks. How many dollars are there now?",
        *(_times_and_more, _MORE, 2, 9),
    ),
    Template(
        "There are {a} tables with {b} chairs each, and {c} chairs by the wall. How many chairs are there?",
        *(_times_and_more, _MORE, 2, 9),
    ),
    Template(
        "{name} has {a*b+c} dollars and buys {b} toys at {a} dollars each. How many dollars are left?",
        *(lambda n: n.c, _FEWER, 2, 9),
    ),
    Template(
        "{name} baked {a*b+c} cookies and filled {b} bags with {a} each. How many cookies are left over?",
        *(lambda n: n.c, _FEWER, 2, 9),
    ),
    Template(
        "{name} found {a} {things} on Friday, {b} on Saturday and {c} on Sunday. How many is that in all?",
        *(lambda n: n.a + n.b + n.c, _TWICE, 2),
    ),
    Template(
        "A shelf holds {a} {things}, another {b}, a third one {c}. How many are on all three?",
        *(lambda n: n.a + n.b + n.c, _TWICE, 2),
    ),
    Template(
        "{name} had {a+b+c} {things}, gave {b} to {other} and lost {c}. How many are left?",
        *(lambda n: n.a, _AFTER, 2),
    ),
    Template(
        "Of {a+b+c} birds on a roof, {b} fly away, then {c} more. How many birds are left?",
        *(lambda n: n.a, _AFTER, 2),
    ),
    Template(
        "{name} has {a*b-c} {things}, gets {c} more and shares all evenly among {b} friends. How many does each get?",
        *(_share, _SHARED, 2, 9),
    ),
    Template(
        "A cup costs {b} dollars and a plate {c}. What do {a} cups and {a} plates cost together?",
        *(lambda n: n.a * (n.b + n.c), _PRICE, 2, 9),
    ),
)


def held_out() -> frozenset[str]:
    """Returns the templates that are never trained: those with the smallest digests, fixed before the first run."""
    digests = {t.text: hashlib.blake2b(t.text.encode(), digest_size=8).digest() for t in TEMPLATES}
    return frozenset(sorted(digests, key=lambda text: digests[text])[:_HELD_OUT_TEMPLATES])


@dataclass(frozen=True)
@as_declared
class WordProblems:
    """One answer, a number, is right. A demonstration works it out in a line."""

    templates: Literal["trained", "held_out"] = "trained"  # of the evaluation
    largest: int = 30  # the largest number that a problem begins with
    train_problems: int = 4000  # distinct problems
    eval_problems: int = 1000  # distinct problems
    seed: int = 0  # of the problems

    def __post_init__(self) -> None:
        if min(self.train_problems, self.eval_problems) < 1 or not 10 <= self.largest <= 10**6 or self.seed < 0:
            raise UserError(
                f"word_problems has {self.train_problems} train_problems, {self.eval_problems} eval_problems, largest "
                f"{self.largest} and seed {self.seed}: give at least 1 of each, 10 to 1,000,000 and a seed from 0"
            )

    @property
    def name(self) -> str:
        return "word_problems"

    def problems(self, split: Split) -> list[Problem]:
        """Returns distinct problems, of one template after another."""
        held_out_templates = held_out()
        is_new_template = split == "eval" and self.templates == "held_out"
        templates = [t for t in TEMPLATES if (t.text in held_out_templates) == is_new_template]
        count = self.eval_problems if split == "eval" else self.train_problems
        rng = Random(f"{self.seed} {split} {self.templates if split == 'eval' else ''}")  # noqa: S311
        problems_by_text: dict[str, Problem] = {}
        for template in itertools.cycle(templates):
            if len(problems_by_text) == count:
                break
            problem = _problem(template, self.largest, rng)
            text = str(problem.fields["question"])
            if is_new_template or is_held_out(text, _HELD_OUT_PROBLEMS) == (split == "eval"):
                problems_by_text.setdefault(text, problem)
        return list(problems_by_text.values())

    def reward(self) -> Reward:
        return ExactAnswer()


def _problem(template: Template, largest: int, rng: Random) -> Problem:
    largest_factor = template.largest_factor or largest
    n = Numbers(rng.randint(2, largest), rng.randint(2, largest_factor), rng.randint(2, largest_factor))
    n = n._replace(c=min(n.c, n.a * n.b - 2))  # nobody has 1 apples, or less than none
    name, other_name = rng.sample(_NAMES, 2)
    slots = {"name": name, "other": other_name, "things": rng.choice(_THINGS)}
    slots |= {slot: str(value) for slot, value in _slot_values(n).items()}
    question, demonstration = _fill_slots(template.text, slots), _fill_slots(template.worked_answer, slots)
    fields = {"question": question, "answer": str(template.solve(n)), "steps": template.steps}
    return Problem(({"role": "user", "content": question + QUESTION_SUFFIX},), fields, demonstration)


def _slot_values(n: Numbers) -> dict[str, int]:
    a, b, c = n
    sums = {"a": a, "b": b, "c": c, "a+b": a + b, "a+c": a + c, "a+b+c": a + b + c}
    products = {"a*b": a * b, "a*c": a * c, "a*b+c": a * b + c, "a*b-c": a * b - c, "a*b+a*c": a * b + a * c}
    return sums | products


def _fill_slots(text: str, slots: dict[str, str]) -> str:
    for name, value in slots.items():
        text = text.replace(f"{{{name}}}", value)
    return text


assert isinstance(instruct.model, HuggingFace)
recipe = replace(
    instruct,
    name="word_problems",
    description="SmolLM2-135M-Instruct learns to solve word problems of one or two steps, two CPU processes",
    task=WordProblems(largest=12),  # this model hardly learns sums of larger numbers
    model=replace(
        instruct.model,
        generation=EngineSettings(slots=64, max_completion_tokens=48),
        warm_start=WarmStart(sft=SupervisedSettings(steps=60, batch_size=16, lr=1e-4)),  # of `tba sft`
    ),
    optimizer=OptimizerSettings(lr=2e-4, schedule=WarmupStableDecay(5, 120, 55, final=0.1)),
    evaluation=EvaluationSettings(
        every=40, problems=200, problems_during=200, greedy=False, batch_size=64, logged_problems=1000
    ),
    steps=180,
)
