"""Connects a searcher with the rest of its run: the journal, the weights, and the records of what it did.

Invariant: a searcher has these connections and no others, so it need not know whether they lead to its own disk (here)
or to the gateway on a trainer's machine (`remote`), nor whether a round is written while it makes the next one
(`background_journal`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from tba.protocols import Answered, Journal, Records, WeightSource
from tba.recipe import Recipe
from tba.record.evaluations import EvaluationWriter
from tba.record.faults import record_fault
from tba.record.jsonl import write_json
from tba.replay.journal import JournalWriter
from tba.runtime.run_directory import RunDirectory
from tba.types import Evaluation, Json
from tba.weights.directory import WeightDirectory


@dataclass(frozen=True)
class RunRecords:
    """`Records` in the run's own directory."""

    run: RunDirectory
    recipe: Recipe

    def write(self, evaluations: Sequence[Evaluation], answers: Sequence[Answered] = ()) -> None:
        """Write the results of one evaluation of one version."""
        with closing(EvaluationWriter(self.run.path, text=not self.recipe.record.hide_text)) as writer:
            writer.write(evaluations, answers)

    def fault(self, kind: str, description: str) -> None:
        """Record a fault that the run survived."""
        record_fault(self.run.path, kind, description)

    def result(self, worker: str, result: Json) -> None:
        """Leave what the summary needs of the worker."""
        write_json(self.run.result(worker), result)


@dataclass(frozen=True)
class Connections:
    """All connections of one searcher. incarnation: that of the run, when the searcher was started."""

    journal: Journal
    weights: WeightSource
    records: Records
    incarnation: int


def connect_on_disk(
    recipe: Recipe, run: RunDirectory, name: str, interrupted: Callable[[], bool] | None = None
) -> Connections:
    """Returns the connections to a run on this machine, and releases prompts leased under this name before."""
    journal = JournalWriter(
        run.journal(recipe), name, recipe.run.journal_deadline, on_wait=interrupted or (lambda: None), create=False
    )
    journal.resume()
    return Connections(journal, WeightDirectory(run.weights), RunRecords(run, recipe), run.incarnation)
