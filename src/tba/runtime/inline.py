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
from tba.runtime.devices import extend_segments, searcher_share
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
        """Run to the end; returns the faults that it survived. Ctrl-C ends it at a token or step, with a checkpoint."""
        torch.set_num_threads(self.recipe.run.threads)
        clock = self.run.clock()
        with log_to(self.run.path, "inline"), stop_requests() as stop, ExitStack() as closers:
            with searcher_share(self.recipe):
                extend_segments(self.recipe, "searcher")
                searcher_loop = start_searching(self.recipe, self.run, 0, interrupted=stop)
            closers.callback(searcher_loop.close)
            trainer_loop = start_training(
                self.recipe,
                self.run,
                stop=stop,
                prefetch=False,
                turn_taker=searcher_loop,
                elapsed=lambda: clock() - searcher_loop.clock.seconds().get("eval", 0.0),
            )
            closers.callback(trainer_loop.close)
            _restore(searcher_loop, trainer_loop)
            self._turns(searcher_loop, trainer_loop, stop)
            trainer_loop.finish()
            self.tell("evaluating", "")
            _evaluate(searcher_loop, trainer_loop)
            is_finished = trainer_loop.finished
            is_evaluated = evaluated_to_the_end(self.run.path, self.recipe.steps, trainer_loop.requests.pending)
            self.stopped = not is_finished or (stop() and not is_evaluated)
            self.exit_code = 0 if is_finished else stop.exit_code
        return {"stopped": self.stopped}

    def _turns(self, searcher_loop: SearcherLoop, trainer_loop: TrainerLoop, stop: Callable[[], bool]) -> None:
        _evaluate(searcher_loop, trainer_loop)
        while not trainer_loop.finished and not stop():
            for _ in range(0 if self.recipe.offline else self.recipe.run.inline_rounds_per_sync):
                if not searcher_loop.is_ahead():
                    searcher_loop.turn(trainer_loop.clock)
            published = trainer_loop.trainer.published
            while trainer_loop.trainer.published == published and not trainer_loop.finished and not stop():
                with searcher_loop.clock.state("idle"):
                    trainer_loop.step()
                self.tell("training", "")
            _evaluate(searcher_loop, trainer_loop)


def _restore(searcher_loop: SearcherLoop, trainer_loop: TrainerLoop) -> None:
    """Continue the searcher with the checkpoint's random draws, unless it has put something since: else it would draw a
    second time what is there already.
    """
    state = trainer_loop.resumed_state
    if state and state.searcher is not None and trainer_loop.journal.totals().rows == state.journal["rows"]:
        searcher_loop.restore(state.searcher)


def _evaluate(searcher_loop: SearcherLoop, trainer_loop: TrainerLoop) -> None:
    """Evaluate what the newest weights request, if anything; nobody trains meanwhile."""
    with trainer_loop.clock.state("eval"):
        searcher_loop.evaluate()
