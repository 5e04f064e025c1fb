"""IFEval (Zhou et al. 2023, arXiv 2311.07911; Apache-2.0): instructions whose fulfilment a function can check.

Invariant: it is for evaluation alone; there is nothing in it to train on. An answer is right when it fulfils all
instructions of its prompt: IFEval's prompt-level strict accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.errors import UserError
from tba.fields import as_declared
from tba.json_input import check_json
from tba.rewards.ifeval import IfEvalReward, instruction_kinds
from tba.tasks.problem_rows import ProblemRow, read_rows, rows_from_hub
from tba.types import Problem, Split

_LOCAL_SOURCE = "the file input_data.jsonl of google-research/instruction_following_eval"


@dataclass(frozen=True)
@as_declared
class IfEval:
    """The prompts of `path`, as chat messages."""

    path: str = "google/IFEval"  # a Hub name, or the JSON Lines file

    @property
    def name(self) -> str:
        return "ifeval"

    def problems(self, split: Split) -> list[Problem]:
        """Returns all prompts in the file's order. Raises `UserError` for a malformed file and for training."""
        if split == "train":
            raise UserError("ifeval has no training prompts: train on another one, such as instruct, and evaluate here")
        is_file = Path(self.path).is_file()
        rows = read_rows(Path(self.path)) if is_file else rows_from_hub("ifeval", self.path, "train", _LOCAL_SOURCE)
        return [_problem(row) for row in rows]

    def reward(self) -> IfEvalReward:
        return IfEvalReward()


def _problem(row: ProblemRow) -> Problem:
    question = row.text("prompt")
    try:
        check_json(row.values, {"instruction_id_list": list[str], "kwargs": list[dict[str, Any]]}, "it")
        kinds, arguments = row.values["instruction_id_list"], row.values["kwargs"]
        if not kinds or len(kinds) != len(arguments) or not instruction_kinds().issuperset(kinds):
            raise ValueError("they are not some of IFEval's kinds, and as many kwargs")
    except ValueError as error:
        raise UserError(f"{row.place} has no instructions of IFEval ({error}): give {_LOCAL_SOURCE}") from error
    fields = {"question": question, "instruction_id_list": kinds, "kwargs": arguments}
    return Problem(({"role": "user", "content": question},), fields)
