"""Functions of one line, described in a few words of a grammar: `# sum of squares, even`, `sum(x*x for x in a if ...)`.

Invariant: a description has exactly one kind (an aggregate, a mapping and a condition), and the kinds of evaluation are
in no training prompt. Every wrong variant of a gold differs from it in one of the three, and fails one of its tests.

Demonstrations can forget conditions: a base policy trained on them has a bad habit, which running its code can break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from tba.errors import UserError
from tba.fields import as_declared
from tba.rewards.code_reward import CodeReward
from tba.tasks.held_out import check_share, is_held_out
from tba.types import Json, Problem, Split

AGGREGATES: dict[str, tuple[str, Callable[[list[int]], Json]]] = {
    "sum": ("sum({})", sum),
    "largest": ("max([{}],default=0)", lambda items: max(items, default=0)),
    "smallest": ("min([{}],default=0)", lambda items: min(items, default=0)),
    "count": ("len([{}])", len),
    "list": ("[{}]", list),
    "reverse": ("[{}][::-1]", lambda items: items[::-1]),
}
MAPPINGS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "numbers": ("x", lambda x, k: x),
    "squares": ("x*x", lambda x, k: x * x),
    "opposites": ("-x", lambda x, k: -x),
    "numbers plus {}": ("x+{}", lambda x, k: x + k),
    "numbers times {}": ("x*{}", lambda x, k: x * k),
}
CONDITIONS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "": ("", lambda x, k: True),
    "even": (" if x%2==0", lambda x, k: x % 2 == 0),
    "odd": (" if x%2==1", lambda x, k: x % 2 == 1),
    "above {}": (" if x>{}", lambda x, k: x > k),
    "below {}": (" if x<{}", lambda x, k: x < k),
}
_CONSTANTS = range(2, 10)
_TESTS = 5  # of a problem, or more until all variants fail one


@dataclass(frozen=True)
class OneLiner:
    """A function of a list of integers."""

    aggregate: str
    mapping: str
    condition: str
    term: int = 2  # of the mapping, where it has one
    bound: int = 2  # of the condition, where it has one

    @property
    def kind(self) -> str:
        return f"{self.aggregate}/{self.mapping}/{self.condition}"

    @property
    def prompt(self) -> str:
        """Returns the description and the beginning of the function."""
        words = f"# {self.aggregate} of {self.mapping.format(self.term)}"
        words += f", {self.condition.format(self.bound)}" if self.condition else ""
        return f"{words}\ndef f(a): return "

    @property
    def code(self) -> str:
        """Returns the rest of the function."""
        item, condition = MAPPINGS[self.mapping][0], CONDITIONS[self.condition][0]
        return AGGREGATES[self.aggregate][0].format(
            f"{item.format(self.term)} for x in a{condition.format(self.bound)}"
        )

    def value(self, numbers: list[int]) -> Json:
        """Returns what the function returns for a list."""
        holds, item = CONDITIONS[self.condition][1], MAPPINGS[self.mapping][1]
        return AGGREGATES[self.aggregate][1]([item(x, self.term) for x in numbers if holds(x, self.bound)])

    def variants(self) -> Iterator[OneLiner]:
        """Yields the functions that differ in one part, and so are wrong."""
        yield from (replace(self, aggregate=name) for name in AGGREGATES if name != self.aggregate)
        if self.aggregate != "count":  # which no mapping changes
            yield from (replace(self, mapping=name) for name in MAPPINGS if name != self.mapping)
        yield from (replace(self, condition=name) for name in CONDITIONS if name != self.condition)

    def tests(self, rng: Random) -> list[Json]:
        """Returns tests that the function passes and each variant fails."""
        lists: list[list[int]] = []
        unrefuted = list(self.variants())
        while unrefuted or len(lists) < _TESTS:
            numbers = [rng.randint(-9, 19) for _ in range(rng.randint(3, 6))]
            refuted = [v for v in unrefuted if v.value(numbers) != self.value(numbers)]
            if refuted or not unrefuted:
                lists.append(numbers)
            unrefuted = [v for v in unrefuted if v not in refuted]
        return [{"function": "f", "arguments": [numbers], "expected": self.value(numbers)} for numbers in lists]


@dataclass(frozen=True)
@as_declared
class OneLiners:
    """Descriptions of functions of one line; an answer is the rest of the function, and is run on tests."""

    forgotten_conditions: float = 0.7  # share that demonstrations forget: a bad habit for RL to unlearn
    held_out: float = 0.15  # share of the kinds that are reserved for evaluation
    seed: int = 0  # of the order, the tests and what is forgotten
    code: CodeReward = CodeReward(seconds=4.0)  # how answers are run

    def __post_init__(self) -> None:
        check_share(self.held_out, "one_liners' held_out")
        if not 0 <= self.forgotten_conditions <= 1 or self.seed < 0:
            raise UserError(
                f"one_liners has forgotten_conditions {self.forgotten_conditions} and seed {self.seed}: give a share "
                "from 0 to 1, and a whole number from 0"
            )

    @property
    def name(self) -> str:
        return "one_liners"

    def problems(self, split: Split) -> list[Problem]:
        """Returns all descriptions of a split in an order that the seed decides."""
        return list(self._problems[split])

    def reward(self) -> CodeReward:
        return self.code

    @cached_property
    def _problems(self) -> dict[Split, list[Problem]]:
        rng = Random(self.seed)  # noqa: S311 - problems
        problems: dict[Split, list[Problem]] = {"train": [], "eval": []}
        one_liners = list(all_one_liners())
        rng.shuffle(one_liners)
        for gold in one_liners:
            demonstration = replace(gold, condition="") if rng.random() < self.forgotten_conditions else gold
            problem = Problem(gold.prompt, {"tests": gold.tests(rng), "entry_point": "f"}, demonstration.code)
            problems["eval" if is_held_out(gold.kind, self.held_out) else "train"].append(problem)
        return problems


def all_one_liners() -> Iterator[OneLiner]:
    """Yields each function of the grammar once."""
    for aggregate in AGGREGATES:
        for mapping in MAPPINGS if aggregate != "count" else ["numbers"]:
            for condition in CONDITIONS:
                for term in _CONSTANTS if "{" in mapping else [2]:
                    for bound in _CONSTANTS if "{" in condition else [2]:
                        yield OneLiner(aggregate, mapping, condition, term, bound)
