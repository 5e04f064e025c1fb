"""Any task of reasoning-gym (Stojanovski et al., arXiv 2505.24760), an optional package.

Invariant: training and evaluation are drawn from seeds far apart and share no question text; a problem is regenerated
from its seed and index when an answer is graded, so that only two integers travel with a prompt.

Its `gsm_symbolic` gives 100 GSM8K templates with fresh numbers: held-out numbers, the same templates. In the style
`tba` or `vineppo` its problems look exactly like GSM8K's, and are graded like them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tba.errors import UserError
from tba.fields import as_declared
from tba.protocols import Reward
from tba.rewards.exact_answer import MARK, ExactAnswer
from tba.tasks.gsm8k import Style, demonstration_text, prompt_text
from tba.tasks.reasoning_gym_marks import ReasoningGymScore, Source, entry, require_markable
from tba.types import Json, Problem, Split

_EVAL_SEED = 1 << 30  # problem i of a data set is drawn from seed + i, so the two must lie further apart than any size
_RATIONALE = "answer_cot"  # where gsm_symbolic puts a worked solution
_INSTRUCTION = " Give the result as your final answer. Do not include units."  # added to gsm_symbolic's questions


@dataclass(frozen=True)
@as_declared
class ReasoningGym:
    """One procedural data set of reasoning-gym, graded by its own scorer or, in the GSM8K format, by exact answer."""

    dataset: str = "gsm_symbolic"  # a name in reasoning_gym.factory.DATASETS
    parameters: str = "{}"  # the data set's own settings as a JSON object, e.g. '{"min_terms": 2}'
    train_problems: int = 5_000  # distinct questions, none of them held out
    eval_problems: int = 500  # distinct questions, drawn from a seed far apart
    seed: int = 0  # seed of the problems
    style: Literal["plain", "chat", "tba", "vineppo"] = "plain"  # the bare question, a chat, or GSM8K's two formats
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
        """Returns distinct problems in the data set's order. Raises `UserError` when it does not offer that many."""
        held_out_indices = self._questions("eval", self.eval_problems, frozenset())
        if not self._has_gsm8k_style:
            require_markable(self.dataset)  # before a run is started, not in its searchers
        if split == "eval":
            return [self._problem(index, split) for index in held_out_indices.values()]
        training_indices = self._questions("train", self.train_problems, frozenset(held_out_indices))
        return [self._problem(index, split) for index in training_indices.values()]

    def reward(self) -> Reward:
        if self._has_gsm8k_style:
            return ExactAnswer(self.strict)
        return ReasoningGymScore({"train": self._source("train"), "eval": self._source("eval")})

    def entry(self, split: Split, index: int) -> dict[str, Json]:
        """Returns problem `index` as reasoning-gym gives it: question, answer, metadata."""
        problem: dict[str, Json] = entry(self._source(split), index)
        return problem

    @property
    def _has_gsm8k_style(self) -> bool:
        return self.style in ("tba", "vineppo")

    def _source(self, split: Split) -> Source:
        count = self.eval_problems if split == "eval" else self.train_problems
        seed = self.seed + (_EVAL_SEED if split == "eval" else 0)
        return Source(self.dataset, self.parameters, seed, _draw_limit(count))

    def _questions(self, split: Split, count: int, excluded_questions: frozenset[str]) -> dict[str, int]:
        """Returns the first `count` distinct questions that are not excluded, and their indices."""
        indices: dict[str, int] = {}  # by question
        for index in range(_draw_limit(count)):
            question = self.entry(split, index)["question"]
            if question not in excluded_questions:
                indices.setdefault(question, index)
            if len(indices) == count:
                return indices
        raise UserError(
            f"reasoning_gym's {self.dataset} gave only {len(indices)} distinct {split} problems in "
            f"{_draw_limit(count)} draws, {count} are asked for: lower {split}_problems"
        )

    def _problem(self, index: int, split: Split) -> Problem:
        problem = self.entry(split, index)
        question, answer = problem["question"], problem["answer"]
        fields = {"answer": answer, "split": split, "index": index}
        if self.style == "chat":
            return Problem(({"role": "user", "content": question},), fields, answer)
        if self.style == "plain":
            return Problem(question + "\n", fields, answer)
        return self._as_gsm8k(question, answer, problem["metadata"], fields, self.style)

    def _as_gsm8k(self, question: str, answer: Json, metadata: Json, fields: dict[str, Json], style: Style) -> Problem:
        if not isinstance(answer, str):
            raise UserError(
                f"reasoning_gym's {self.dataset} has problems without one right answer, which style {style!r} needs: "
                "use the style 'plain' or 'chat', which its own scorer marks"
            )
        reasoning = str(metadata.get(_RATIONALE, "")).rpartition(MARK)[0]
        prompt = prompt_text(question.removesuffix(_INSTRUCTION), style)
        return Problem(prompt, fields, demonstration_text(reasoning, answer, style))


def _draw_limit(count: int) -> int:
    """Returns how many problems are drawn at most to find `count` distinct ones."""
    return 4 * count + 100
