"""`evaluations.jsonl` and `answers.jsonl`: the results of each evaluation, written as soon as they are there.

Invariant: a figure here is one of `tba.types.Evaluation`, whole; the answers are those to the same first problems each
time, so that before and after can be compared. Without text (a setting) no answer is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tba.evaluation.estimators import wilson_interval
from tba.protocols import Answered
from tba.record.jsonl import JsonLines, NewLines, read_lines
from tba.record.text import hundredfold, percent
from tba.types import Evaluation, Json, Version

FILE = "evaluations.jsonl"
ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Holds an answer to a held-out problem, a line of `answers.jsonl`."""

    version: Version
    wall_seconds: float
    prompt: str
    completion: str
    reward: float | None  # None: it was not finite
    correct: bool
    metric: str


class EvaluationWriter:
    """Appends the figures and the shown answers of each evaluation."""

    def __init__(self, directory: Path, text: bool = True) -> None:
        self._text = text
        self._figures = JsonLines(directory / FILE)
        self._answers = JsonLines(directory / ANSWERS_FILE)

    def write(self, evaluations: Sequence[Evaluation], answers: Sequence[Answered] = ()) -> None:
        """Append the results of one evaluation of one version."""
        for a in answers if evaluations and self._text else ():
            version, seconds = evaluations[0].version, evaluations[0].wall_seconds
            answer = RecordedAnswer(version, seconds, a.prompt, a.completion, a.reward, a.correct, a.metric)
            self._answers.append(_to_line(answer))
        for e in evaluations:
            self._figures.append(_to_line(e))

    def close(self) -> None:
        self._figures.close()
        self._answers.close()


def read_evaluations(directory: Path) -> list[Evaluation]:
    """Returns a run's figures, in the order written; none when it has none yet."""
    return read_lines(directory / FILE, parse_evaluation)


def figure(evaluation: Evaluation | None) -> str:
    """Returns an evaluation's value with its 95 % interval, `79.3 % [77.4, 81.0]`; `-` for none."""
    if evaluation is None:
        return "-"
    interval = wilson_interval(evaluation.value * evaluation.n, evaluation.n)
    return f"{percent(evaluation.value)} [{hundredfold(interval.low)}, {hundredfold(interval.high)}]"


class RunningEvaluations:
    """Reads the figures of a run again and again: each call of `read_new` reads only what is new."""

    def __init__(self, directory: Path) -> None:
        self._lines = NewLines(directory / FILE, parse_evaluation)
        self.evaluations: list[Evaluation] = []  # all so far

    @property
    def bad_line_count(self) -> int:
        """Returns how many lines could not be read."""
        return len(self._lines.bad_lines)

    @property
    def newest(self) -> list[Evaluation]:
        """Returns the figures of the newest version."""
        version = max((e.version for e in self.evaluations), default=None)
        return [e for e in self.evaluations if e.version == version]

    def read_new(self) -> bool:
        """Read the figures that were written since the last call; returns whether there were any."""
        was_replaced, new_evaluations = self._lines.read()
        self.evaluations = [*([] if was_replaced else self.evaluations), *new_evaluations]
        return bool(new_evaluations)


def parse_evaluation(row: dict[str, Json]) -> Evaluation:
    """Returns the evaluation of a line of `evaluations.jsonl`, or of a summary, which leaves its cost out.

    Raises `ValueError`, `KeyError` or `TypeError` when the line is none.
    """
    evaluation = Evaluation(**_with_version(row))
    numbers = (evaluation.wall_seconds, evaluation.value, evaluation.seconds, evaluation.tokens)
    if not isinstance(evaluation.metric, str) or not all(isinstance(x, int | float) for x in numbers):
        raise TypeError("no evaluation")
    if not (isinstance(evaluation.n, int) and 1 <= evaluation.n < 2**53 and 0 <= evaluation.value <= 1):
        raise ValueError("no share of problems")
    return evaluation


def parse_recorded_answer(row: dict[str, Json]) -> RecordedAnswer:
    """Returns the answer of a line of `answers.jsonl`. Raises `ValueError`, `KeyError` or `TypeError` for another."""
    answer = RecordedAnswer(**_with_version(row))
    if not (isinstance(answer.prompt, str) and isinstance(answer.completion, str)):
        raise TypeError("no answer")
    return answer


def _with_version(row: dict[str, Json]) -> dict[str, Any]:
    return {**row, "version": Version.parse(row["version"])}


def _to_line(record: Evaluation | RecordedAnswer) -> dict[str, Json]:
    # asdict would convert the version to a dict; it is written by its name
    return {**asdict(record), "version": str(record.version)}
