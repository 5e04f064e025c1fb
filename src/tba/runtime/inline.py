"""The `inline` runtime: one process takes turns. Deterministic; the synchronous baseline; the debugger.

Each turn: a searcher's rounds, then up to k optimizer steps; a step that replay will not give a batch for (warm-up,
paced) brings another round. With k = 1, m = 1 and a recent window of 0 this is plain on-policy training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tba.recipe import Recipe
from tba.runtime.directory import RunDirectory
from tba.runtime.searching import SearchHalf, start_searching
from tba.runtime.training import TrainHalf, start_training


@dataclass
class Inline:
    """One run: `go()` until it is finished or stopped."""

    recipe: Recipe
    run: RunDirectory
    tell: Callable[[str, str], None]
    searchers: list[str] = field(default_factory=lambda: ["searcher-0"])
    stopped: bool = False
    _search: SearchHalf | None = None
    _train: TrainHalf | None = None

    def go(self) -> dict[str, object]:
        """Runs to the end; the faults it survived."""
        search = self._search = start_searching(self.recipe, self.run, 0)
        started = self.run.facts["started"]
        train = self._train = start_training(
            self.recipe,
            self.run,
            stop=lambda: False,
            prefetch=False,
            fill=self._round,
            elapsed=lambda: time.time() - started - search.clock.seconds().get("eval", 0.0),
        )
        try:
            self._turns(search, train)
        except KeyboardInterrupt:
            self.stopped = True
        train.finish()
        if not self.stopped:
            search.evaluate()
        train.close()
        search.close()
        return {"searcher_restarts": 0, "stopped": self.stopped}

    def _turns(self, search: SearchHalf, train: TrainHalf) -> None:
        search.evaluate()
        while not train.finished:
            for _ in range(self.recipe.run.inline_rounds_per_sync):
                self._round()
            published = train.trainer.published
            while train.trainer.published == published and not train.finished:
                train.step()
                self.tell("training", "")
            search.evaluate()

    def _round(self) -> None:
        """A searcher's round, on the trainer's clock counted as idle: it is what async saves."""
        assert self._search is not None
        assert self._train is not None
        with self._train.clock.state("idle"):
            self._search.round()
