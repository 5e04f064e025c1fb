"""Any task of reasoning-gym (Stojanovski et al., arXiv 2505.24760), an optional package.

Invariant: training and evaluation are drawn from seeds far apart and share no question text; a problem is regenerated
from its seed and index when it is marked, so that nothing but two integers need travel with a prompt.

Its `gsm_symbolic` gives 100 GSM8K templates with fresh numbers: held-out numbers, the same templates. In the style
`tba` or `vineppo` its problems look exactly like GSM8K's, and are graded like them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tba.errors import UserError
from tba.protocols import Reward
from tba.rewards.exact_answer import MARK, ExactAnswer
from tba.tasks.gsm8k import Style, demonstration_text, prompt_text
from tba.types import Completion, Json, Judgement, Problem, Prompt, Split

_EVAL_SEED = 1 << 30  # problem i of a data set is drawn from seed + i, so the two must lie further apart than any size
_RATIONALE = "answer_cot"  # where gsm_symbolic puts a worked solution
_INSTRUCTION = " Give the result as your final answer. Do not include units."  # added to gsm_symbolic's questions


@dataclass(frozen=True)
class ReasoningGym:
    """One procedural data set of reasoning-gym, marked by its own scorer or in the GSM8K format by exact answer."""

    dataset: str = "gsm_symbolic"  # one of reasoning_gym.factory.DATASETS
    parameters: str = "{}"  # JSON object of the data set's own settings, e.g. '{"min_terms": 2}'
    train_problems: int = 5_000  # distinct questions, none of them held out
    eval_problems: int = 500  # distinct questions, drawn from a seed far apart
    seed: int = 0  # of the problems
    style: Literal["plain", "chat", "tba", "vineppo"] = "plain"  # the question, as a user message, or as GSM8K asks
    strict: bool = False  # in the GSM8K styles: read the number after #### only

    def __post_init__(self) -> None:
        if min(self.train_problems, self.eval_problems) < 1 or not 0 <= self.seed < _EVAL_SEED:
            raise UserError(
                f"reasoning_gym has {self.train_problems} train_problems, {self.eval_problems} eval_problems and seed "
                f"{self.seed}: give at least 1 of each, and a seed from 0 to {_EVAL_SEED - 1}"
            )

    @property
    def name(self) -> str:
        return f"reasoning_gym/{self.dataset}"

    def problems(self, split: Split) -> list[Problem]:
        """Distinct problems in the data set's order. Raises `UserError` when it does not offer that many."""
        held_out = self._questions("eval", self.eval_problems, frozenset())
        if split == "eval":
            return [self._problem(index, split) for index in held_out.values()]
        training = self._questions("train", self.train_problems, frozenset(held_out))
        return [self._problem(index, split) for index in training.values()]

    def reward(self) -> Reward:
        return ExactAnswer(self.strict) if self.style in ("tba", "vineppo") else ReasoningGymScore(self)

    def entry(self, split: Split, index: int) -> dict[str, Json]:
        """Problem `index` as reasoning-gym gives it: question, answer, metadata."""
        entry: dict[str, Json] = self._source(split)[index]
        return entry

    def score(self, answer: str, split: Split, index: int) -> float:
        """The data set's own score of an answer, 0 to 1."""
        return float(self._source(split).score_answer(answer, entry=self.entry(split, index)))

    def _source(self, split: Split) -> Any:
        count = self.eval_problems if split == "eval" else self.train_problems
        seed = self.seed + (_EVAL_SEED if split == "eval" else 0)
        return _opened(self.dataset, self.parameters, seed, _draws(count))

    def _questions(self, split: Split, count: int, taken: frozenset[str]) -> dict[str, int]:
        """The first `count` distinct questions that are not `taken`, and their indices."""
        found: dict[str, int] = {}
        for index in range(_draws(count)):
            question = self.entry(split, index)["question"]
            if question not in taken:
                found.setdefault(question, index)
            if len(found) == count:
                return found
        raise UserError(
            f"reasoning_gym's {self.dataset} gave only {len(found)} distinct {split} problems in {_draws(count)} "
            f"draws, {count} are asked for: lower {split}_problems"
        )

    def _problem(self, index: int, split: Split) -> Problem:
        entry = self.entry(split, index)
        question, answer = entry["question"], entry["answer"]
        fields = {"answer": answer, "split": split, "index": index}
        if self.style == "chat":
            return Problem(({"role": "user", "content": question},), fields, answer)
        if self.style == "plain":
            return Problem(question + "\n", fields, answer)
        return self._as_gsm8k(question, answer, entry["metadata"], fields, self.style)

    def _as_gsm8k(self, question: str, answer: Json, metadata: Json, fields: dict[str, Json], style: Style) -> Problem:
        if not isinstance(answer, str):
            raise UserError(
                f"reasoning_gym's {self.dataset} has problems without one right answer, which style {style!r} needs: "
                "use the style 'plain' or 'chat', which its own scorer marks"
            )
        reasoning = str(metadata.get(_RATIONALE, "")).rpartition(MARK)[0]
        asked = prompt_text(question.removesuffix(_INSTRUCTION), style)
        return Problem(asked, fields, demonstration_text(reasoning, answer, style))


@dataclass(frozen=True)
class ReasoningGymScore:
    """A completion's score by the data set itself, 0 to 1: of what stands in `<answer>` tags, or else of all of it."""

    task: ReasoningGym

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """One judgement for each, in order."""
        return [Judgement(self.task.score(_answer(c.text), p.fields["split"], p.fields["index"])) for p, c in answered]


def _answer(text: str) -> str:
    _, opened, after = text.rpartition("<answer>")
    return (after.partition("</answer>")[0] if opened else text).strip()


def _draws(count: int) -> int:
    """How many problems are drawn to find `count` distinct ones."""
    return 4 * count + 100


@functools.lru_cache(maxsize=8)
def _opened(dataset: str, parameters: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"the task reasoning_gym ({dataset}) needs the package reasoning-gym: `pip install reasoning-gym`"
        ) from error
    try:
        settings = json.loads(parameters)
    except (ValueError, RecursionError) as error:
        raise UserError(f"reasoning_gym has parameters {parameters!r}, which are not JSON: {error}") from error
    if not isinstance(settings, dict) or {"seed", "size"} & settings.keys():
        raise UserError(f"reasoning_gym has parameters {parameters!r}: give a JSON object without seed and size")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(
            f"reasoning_gym cannot make {dataset!r} with parameters {parameters}: {error} "
            "(reasoning_gym.factory.DATASETS lists the names)"
        ) from error
