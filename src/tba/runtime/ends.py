"""How a searching half reaches the rest of its run: the journal, the weights, what is recorded of it.

Invariant: a searcher has these ends and no others, so it need not know whether what it asks lies on its own disk (here)
or beside a trainer on another machine (`remote`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tba.protocols import WeightSource
from tba.recipe import Recipe
from tba.record.evaluations import Answered, EvaluationWriter
from tba.record.faults import record_fault
from tba.record.jsonl import write_json
from tba.replay.journal import JournalWriter
from tba.replay.scores import Score
from tba.runtime.directory import RunDirectory
from tba.search.sink import KnowingSink
from tba.types import Evaluation, Json, Trajectory, Version
from tba.weights.directory import WeightDirectory


class SearchJournal(KnowingSink, Protocol):
    """The journal's end of one owner (`JournalWriter` is one)."""

    def rows(self) -> int: ...

    def lease(self, count: int, seconds: float) -> list[int]: ...

    def lease_first(self, order: Iterable[int], count: int, seconds: float) -> list[int]: ...

    def outcomes(self, after: int) -> list[tuple[int, int, float, float]]: ...

    def unscored(self, reference: Version, count: int, seconds: float) -> list[Trajectory]: ...

    def put_scores(self, scored: Sequence[Score], counters: Mapping[str, int] | None = None) -> None: ...

    def claim(self, job: str, seconds: float) -> bool: ...

    def finish(self, job: str, evaluations: Sequence[Evaluation]) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class Records(Protocol):
    """What a searching half leaves for people and for the summary."""

    def write(self, evaluations: Sequence[Evaluation], answers: Sequence[Answered] = ()) -> None:
        """Those of one evaluation of one version."""
        ...

    def fault(self, kind: str, what: str) -> None:
        """One that was survived."""
        ...

    def result(self, part: str, result: Json) -> None:
        """What the summary needs of the part."""
        ...

    def close(self) -> None: ...


class RunRecords:
    """Records in the run's own directory."""

    def __init__(self, run: RunDirectory, recipe: Recipe) -> None:
        self._run = run
        self._evaluations = EvaluationWriter(run.path, text=not recipe.record.hide_text)

    def write(self, evaluations: Sequence[Evaluation], answers: Sequence[Answered] = ()) -> None:
        """Those of one evaluation of one version."""
        self._evaluations.write(evaluations, answers)

    def fault(self, kind: str, what: str) -> None:
        """One that was survived."""
        record_fault(self._run.path, kind, what)

    def result(self, part: str, result: Json) -> None:
        """What the summary needs of the part."""
        write_json(self._run.result(part), result)

    def close(self) -> None:
        self._evaluations.close()


@dataclass(frozen=True)
class Ends:
    """All of them. incarnation: of the run, when the half was started."""

    journal: SearchJournal
    weights: WeightSource
    records: Records
    incarnation: int


def on_disk(recipe: Recipe, run: RunDirectory, name: str, interrupted: Callable[[], bool] | None = None) -> Ends:
    """Those of the run at `run`, on this machine. What whoever had this name before held is given back."""
    journal = JournalWriter(
        run.journal(recipe), name, recipe.run.journal_deadline, waiting=interrupted or (lambda: None), create=False
    )
    journal.resume()
    return Ends(journal, WeightDirectory(run.weights), RunRecords(run, recipe), run.incarnation)
