"""MBPP, short Python problems with three asserts each (Austin et al., arXiv 2108.07732): 374 to train, 500 to evaluate.

Invariant: the tests that a prompt shows say how the function is called; those that it does not show are graded as well.
The problems are not part of this package: give a folder, or a name on the Hub.

A row has `text` (or `prompt`, in the sanitized version), `code` and `test_list`, and may have `test_setup_code`,
`test_imports` and `program_names` (docs/code_rewards.md). A folder has train.jsonl and test.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tba.errors import UserError
from tba.fields import as_declared
from tba.rewards.code_reward import CodeReward
from tba.tables import file_in
from tba.tasks.held_out import IN_BOTH, exclude
from tba.tasks.problem_rows import ProblemRow, read_rows, rows_from_hub
from tba.types import Problem, Split

_FILE = {"train": "train", "eval": "test"}
_TEST_COLUMNS = ("test_list", "test_setup_code", "test_imports", "program_names")
_PROMPT = "{question}\n\nYour code should pass tests such as\n\n{tests}\n\nAnswer with one block of Python code."


@dataclass(frozen=True)
@as_declared
class Mbpp:
    """MBPP itself, from a folder or the Hub, as chat messages."""

    path: str = "google-research-datasets/mbpp"  # a Hub name, or a folder with train.jsonl and test.jsonl
    version: str = "full"  # configuration on the Hub: full, or sanitized (120 to train, 257 to evaluate)
    shown_tests: int = 1  # asserts that the prompt shows; all are graded
    code: CodeReward = field(default_factory=CodeReward)  # how answers are run

    def __post_init__(self) -> None:
        if self.shown_tests < 1:
            raise UserError(f"mbpp has shown_tests {self.shown_tests}: give at least 1, which names the function")

    @property
    def name(self) -> str:
        return "mbpp"

    def problems(self, split: Split) -> list[Problem]:
        """Returns all problems in the file's order; training leaves out what is also in the evaluation file.

        Raises `UserError` for a missing or malformed file, naming its line.
        """
        rows = self._rows(split)
        return [self._problem(row) for row in (rows if split == "eval" else self._without_held_out(rows))]

    def left_out(self) -> Mapping[str, int]:
        rows = self._rows("train")
        return {IN_BOTH: len(rows) - len(self._without_held_out(rows))}

    def reward(self) -> CodeReward:
        return self.code

    def _without_held_out(self, rows: list[ProblemRow]) -> list[ProblemRow]:
        return exclude(rows, self._rows("eval"), _question)

    def _rows(self, split: Split) -> list[ProblemRow]:
        folder = Path(self.path)
        if not folder.is_dir():
            remedy = "a folder with train.jsonl and test.jsonl"
            return rows_from_hub("mbpp", self.path, _FILE[split], remedy, self.version)
        return read_rows(file_in(folder, _FILE[split]) or folder / f"{_FILE[split]}.jsonl")

    def _problem(self, row: ProblemRow) -> Problem:
        tests = row.value("test_list")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise UserError(f"{row.place} has {tests!r:.80} as its 'test_list': give a list of asserts")
        prompt = _PROMPT.format(question=_question(row), tests="\n".join(tests[: self.shown_tests]))
        fields = {name: row.value(name) for name in _TEST_COLUMNS if row.value(name)}
        demonstration = f"```python\n{row.text('code').strip()}\n```"
        return Problem(({"role": "user", "content": prompt},), fields, demonstration)


def _question(row: ProblemRow) -> str:
    return row.text("text" if row.has("text") else "prompt").strip()
