"""The `inline` runtime: searcher and trainer take turns in one process. It is deterministic, the synchronous baseline,
and the place to debug.

Each turn: a searcher's rounds, then up to k optimizer steps; a step for which replay has no batch (warm-up, paced)
brings another round. With k = 1, m = 1 and rounds of a batch this is plain on-policy training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from tba.recipe import Recipe
from tba.record.log import log_to
from tba.runtime.evaluation import evaluated_to_the_end
from tba.runtime.run_directory import RunDirectory
from tba.runtime.searcher_loop import SearcherLoop, start_searching
from tba.runtime.stop_requests import stop_requests
from tba.runtime.trainer_loop import TrainerLoop, start_training


@dataclass
class Inline:
    """One run: `go()` until it is finished or stopped."""

    recipe: Recipe
    run: RunDirectory
    tell: Callable[[str, str], None]
    searchers: list[str] = field(default_factory=lambda: ["searcher-0"])
    stopped: bool = False  # before its last step, or in its last evaluation
    exit_code: int = 0  # 128 and the signal that ended it before its last step

    def go(self) -> dict[str, object]:
        """Run to the end; returns the faults that it survived. Ctrl-C ends it between two tokens or steps, with a
        checkpoint.
        """
        torch.set_num_threads(self.recipe.run.threads)
        clock = self.run.clock()
        with log_to(self.run.path, "inline"), stop_requests() as stop, ExitStack() as ends:
            search = start_searching(self.recipe, self.run, 0, interrupted=stop)
            ends.callback(search.close)
            train = start_training(
                self.recipe,
                self.run,
                stop=stop,
                ahead=False,
                turn_taker=search,
                elapsed=lambda: clock() - search.clock.seconds().get("eval", 0.0),
            )
            ends.callback(train.close)
            _restore(search, train)
            self._turns(search, train, stop)
            train.finish()
            self.tell("evaluating", "")
            _evaluate(search, train)
            self.stopped = not train.finished or (stop() and not evaluated_to_the_end(self.run.path, self.recipe.steps))
            self.exit_code = 0 if train.finished else stop.exit_code
        return {"stopped": self.stopped}

    def _turns(self, search: SearcherLoop, train: TrainerLoop, stop: Callable[[], bool]) -> None:
        _evaluate(search, train)
        while not train.finished and not stop():
            for _ in range(0 if self.recipe.offline else self.recipe.run.inline_rounds_per_sync):
                if not search.ahead():
                    search.turn(train.clock)
            published = train.trainer.published
            while train.trainer.published == published and not train.finished and not stop():
                with search.clock.state("idle"):
                    train.step()
                self.tell("training", "")
            _evaluate(search, train)


def _restore(search: SearcherLoop, train: TrainerLoop) -> None:
    """Continue the searcher with the checkpoint's random draws, unless it has put something since: else it would draw a
    second time what is there already.
    """
    state = train.resumed
    if state and state["searcher"] is not None and train.journal.totals().rows == state["journal"]["rows"]:
        search.restore(state["searcher"])


def _evaluate(search: SearcherLoop, train: TrainerLoop) -> None:
    """Evaluate what the newest weights request, if anything; nobody trains meanwhile."""
    with train.clock.state("eval"):
        search.evaluate()
