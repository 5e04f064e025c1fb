"""GSM8K, grade-school word problems (Cobbe et al., arXiv 2110.14168; MIT licence): 7,473 to train, 1,319 to evaluate.

Invariant: a prompt is one of the two texts that published models were trained on, to the character, or a message of the
user in the words of verl's data; the right answer is what follows `####` in the solution, without commas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tba.errors import UserError
from tba.fields import as_declared
from tba.rewards.exact_answer import MARK, ExactAnswer
from tba.tables import file_in
from tba.tasks.held_out import IN_BOTH, exclude
from tba.tasks.problem_rows import ProblemRow, read_rows, rows_from_hub
from tba.types import Problem, Split

Style = Literal["tba", "vineppo"]

_PROMPT = {
    "tba": "[MATH TASK] Problem:\n{question}\n\nSolution:\n",  # the official TBA code
    "vineppo": "[MATH_TASK] Problem:\n{question}\n\nSolution:",  # VinePPO, async_rlhf, the rho-1b SFT model
}
INSTRUCTION = (
    f'Let\'s think step by step and output the final answer after "{MARK}".'  # verl's examples/data_preprocess
)
_BEFORE_SOLUTION = {"tba": "", "vineppo": "\n"}  # that prompt ends before the line break
_FILE = {"train": "train", "eval": "test"}
_CALCULATION = re.compile(r"<<[^<>]*+>>")
_LOCAL_SOURCE = "a folder with train.jsonl and test.jsonl or a JSON Lines file"


@dataclass(frozen=True)
@as_declared
class Gsm8k:
    """GSM8K itself, or any file with `question` and `answer` in the same format."""

    path: str = "openai/gsm8k"  # a Hub name, a folder with train.jsonl and test.jsonl, or the training file itself
    eval_path: str | None = None  # the evaluation file, where `path` is the training file
    style: Literal["tba", "vineppo", "chat"] = "tba"  # "vineppo" for rho-1b-sft-GSM8K; "chat" for instruct models
    strict: bool = False  # read the number after #### only, not the last one of the text
    calculator: bool = False  # keep the file's calculator annotations, <<48/2=24>>, in the demonstrations

    @property
    def name(self) -> str:
        return "gsm8k"

    def problems(self, split: Split) -> list[Problem]:
        """Returns all problems in the file's order; training leaves out what is also in the evaluation file.

        Raises `UserError` for a missing or malformed file, naming its line.
        """
        rows = self._rows("eval") if split == "eval" else self._training_rows(self._rows("train"))
        return [self._problem(row) for row in rows]

    def left_out(self) -> Mapping[str, int]:
        rows = self._rows("train")
        return {IN_BOTH: len(rows) - len(self._training_rows(rows))}

    def _training_rows(self, rows: list[ProblemRow]) -> list[ProblemRow]:
        """Returns the rows that are not held out."""
        return exclude(rows, self._rows("eval"), lambda row: row.text("question").strip()) if self._has_eval() else rows

    def reward(self) -> ExactAnswer:
        return ExactAnswer(self.strict)

    def _has_eval(self) -> bool:
        return self.eval_path is not None or not Path(self.path).is_file()

    def _rows(self, split: Split) -> list[ProblemRow]:
        path = Path(self.path)
        if split == "eval" and self.eval_path is not None:
            return read_rows(Path(self.eval_path))
        if path.is_dir():
            return read_rows(file_in(path, _FILE[split]) or path / f"{_FILE[split]}.jsonl")
        if path.is_file():
            if split == "eval":
                raise UserError(
                    f"gsm8k has the training file {path} but nothing to evaluate on: give eval_path, "
                    "or as path a folder with train.jsonl and test.jsonl"
                )
            return read_rows(path)
        return rows_from_hub("gsm8k", self.path, _FILE[split], _LOCAL_SOURCE, "main")

    def _problem(self, row: ProblemRow) -> Problem:
        question, solution = row.text("question").strip(), row.text("answer").strip()
        reasoning, mark, marked_answer = solution.rpartition(MARK)
        answer = marked_answer.strip().replace(",", "")
        if not mark or not answer:
            raise UserError(f"{row.place} has a field 'answer' without '{MARK} number' at its end: write it like GSM8K")
        if not self.calculator:
            reasoning = _CALCULATION.sub("", reasoning)
        fields = {"question": question, "answer": answer}
        if self.style == "chat":
            messages = ({"role": "user", "content": f"{question} {INSTRUCTION}"},)
            return Problem(messages, fields, demonstration_text(reasoning, answer, "tba"))
        return Problem(prompt_text(question, self.style), fields, demonstration_text(reasoning, answer, self.style))


def prompt_text(question: str, style: Style) -> str:
    """Returns the question as the model sees it."""
    return _PROMPT[style].replace("{question}", question)


def demonstration_text(reasoning: str, answer: str, style: Style) -> str:
    """Returns a worked solution as the model should write it; its last line is `#### answer`."""
    lines = [reasoning.strip()] if reasoning.strip() else []
    return _BEFORE_SOLUTION[style] + "\n".join([*lines, f"{MARK} {answer}"])
