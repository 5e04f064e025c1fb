r"""MATH, competition problems (Hendrycks et al., arXiv 2103.03874): 7,500 to train, 5,000 or MATH-500 to evaluate.

Invariant: the right answer is what the worked solution has in its box, never a normalised form of it; no problem is in
both training and evaluation. The problems are not part of this package: give a folder, or a name on the Hub.

A row has `problem` and `solution` (ending in `\boxed{...}`), and may have `answer`, `level`, `type` or `subject`, and
`in_math500`. A folder has train.jsonl and test.jsonl, and may have math500.jsonl; each may be gzipped (.gz).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tba.errors import UserError
from tba.fields import as_declared
from tba.rewards.math_answer import MathAnswer
from tba.rewards.math_text import last_boxed
from tba.tables import file_in
from tba.tasks.held_out import IN_BOTH, exclude
from tba.tasks.problem_rows import ProblemRow, read_rows, rows_from_hub
from tba.types import Message, Problem, Split

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_PLAIN_PROMPT = "Problem:\n{problem}\n\n{instruction}\n\nSolution:\n"
_MATH500_SIZE = 500


@dataclass(frozen=True)
@as_declared
class Math:
    """MATH itself, from a folder or the Hub."""

    path: str = "nlile/hendrycks-MATH-benchmark"  # a Hub name or folder with train.jsonl and test.jsonl (or .jsonl.gz)
    evaluate_on: Literal["test", "math500"] = "test"  # the whole test split, or its 500 problems known as MATH-500
    train_on_rest: bool = False  # with math500: also on the test problems not in it, 12,000 in all (the paper's)
    style: Literal["plain", "chat"] = "plain"  # text as a base model reads it, or the tokenizer's chat template
    graders: int = 2  # processes per searcher that compare answers
    grading_seconds: float = 5.0  # time limit of one comparison; after it the answer counts as wrong

    @property
    def name(self) -> str:
        return "math"

    def problems(self, split: Split) -> list[Problem]:
        """Returns all problems in the file's order; training leaves out those without an answer and those also in the
        test.

        Raises `UserError` for a missing or malformed file, naming its line.
        """
        if split == "eval":
            return [self._problem(row) for row in self._evaluation_rows()]
        rows, held_out = self._training_rows()
        return [self._problem(row) for row in exclude(rows, held_out, _question) if _has_answer(row)]

    def left_out(self) -> Mapping[str, int]:
        rows, held_out = self._training_rows()
        new_rows = exclude(rows, held_out, _question)
        return {IN_BOTH: len(rows) - len(new_rows), "without an answer": sum(not _has_answer(row) for row in new_rows)}

    def reward(self) -> MathAnswer:
        return MathAnswer(self.graders, self.grading_seconds)

    def _training_rows(self) -> tuple[list[ProblemRow], list[ProblemRow]]:
        """Returns the rows to train on, and those that are held out of them."""
        rows, held_out = self._rows("train"), self._rows("test")
        if self.train_on_rest and self.evaluate_on == "math500":
            return [*rows, *held_out], self._evaluation_rows()
        return rows, held_out

    def _evaluation_rows(self) -> list[ProblemRow]:
        if self.evaluate_on == "test":
            return self._rows("test")
        file = file_in(Path(self.path), "math500")
        if file is not None:
            return read_rows(file)
        rows = self._rows("test")
        math500_rows = [row for row in rows if row.values.get("in_math500") is True]
        if math500_rows:
            return math500_rows
        if len(rows) == _MATH500_SIZE:
            return rows
        raise UserError(
            f"math has no MATH-500 in {self.path!r}: add math500.jsonl, or a field 'in_math500' to its test rows, or "
            "set --task.evaluate-on test"
        )

    def _rows(self, name: Literal["train", "test"]) -> list[ProblemRow]:
        folder = Path(self.path)
        if not folder.is_dir():
            return rows_from_hub("math", self.path, name, "a folder with train.jsonl and test.jsonl")
        file = file_in(folder, name)
        if file is None:
            raise UserError(f"math has the folder {folder}, but there is no {name}.jsonl (or .jsonl.gz) in it: add it")
        return read_rows(file)

    def _problem(self, row: ProblemRow) -> Problem:
        question, solution = _question(row), row.text("solution").strip()
        answer = row.text("answer") if "answer" in row.values else last_boxed(solution)
        if not answer:
            raise UserError(f"{row.place} has a field 'solution' without \\boxed{{...}}: write it as MATH does")
        fields = {"question": question, "answer": answer.strip()}
        fields |= {name: row.values[name] for name in ("level", "type", "subject") if name in row.values}
        return Problem(self._prompt(question), fields, solution)

    def _prompt(self, question: str) -> str | tuple[Message, ...]:
        if self.style == "plain":
            return _PLAIN_PROMPT.replace("{instruction}", INSTRUCTION).replace("{problem}", question)
        return ({"role": "user", "content": f"{question}\n\n{INSTRUCTION}"},)


def _question(row: ProblemRow) -> str:
    return row.text("problem").strip()


def _has_answer(row: ProblemRow) -> bool:
    """Returns whether a row has an answer: two training problems of the original have an empty box."""
    answer = row.values.get("answer", last_boxed(row.text("solution")))
    return not (isinstance(answer, str) and not answer.strip())
