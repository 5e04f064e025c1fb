"""`tba search --run RUN`: one more searcher for a run that goes on, until the run ends or Ctrl-C."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tba.record.log import log_to
from tba.runtime.directory import RunDirectory
from tba.runtime.joining import Place, joined
from tba.runtime.searching import SearchHalf, start_searching
from tba.runtime.stopping import stop_requests


@dataclass(frozen=True)
class SearchOptions:
    """What is joined."""

    run: Path | None = None  # the directory of a run that goes on, on this machine


def join_run(path: Path) -> int:
    """Exit code 0 when the run ended or Ctrl-C was pressed."""
    import torch

    console = Console()
    run = RunDirectory.open(path)
    recipe = run.recipe()
    torch.set_num_threads(recipe.run.threads)
    with stop_requests() as asked, joined(run, recipe, asked) as place, log_to(run.path, place.name) as log:
        console.print(f"{place.name} joins {run.path}; its log is {log}; Ctrl-C leaves", highlight=False)
        half = start_searching(recipe, run, place.number, interrupted=place.stop)
        try:
            _search(half, place, console, recipe.record.status_seconds)
        finally:
            half.journal.resume()  # what it held is for others
            half.close()
    console.print(f"{place.name} left after {half.searcher.rounds} rounds: {place.why}", highlight=False)
    return 0


def _search(half: SearchHalf, place: Place, console: Console, every: float) -> None:
    """Rounds, each put down whole. It does not evaluate: a job that others wait for is not for one who may leave."""
    said = time.monotonic()
    while not place.stop() and not half.ended():
        half.round()
        if time.monotonic() - said > every:
            said = time.monotonic()
            version = half.searcher.engine.version
            console.print(f"{place.name}: {half.searcher.rounds} rounds, weights {version}", highlight=False)
    place.why = place.why or "the run ended"
