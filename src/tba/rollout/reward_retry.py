"""A reward that may hang or raise, called with a deadline and retried a bounded number of times.

Invariant: `judge` ends: with the judgements, with what the reward last raised, or with `DeadlineExceeded` that names
the reward. Each call runs in a thread of its own, which one that never returns occupies for ever; it is a daemon
thread, so that it cannot keep the process alive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from tba.errors import DeadlineExceeded, UserError
from tba.protocols import Reward
from tba.types import Completion, Judgement, Prompt

T = TypeVar("T")
log = logging.getLogger("tba.searcher")
_FIRST_PAUSE = 0.25  # seconds before a reward is asked again; doubled each time


@dataclass
class PatientReward:
    """A reward with retries around another. Bad input (a `UserError` without another cause) is raised at once."""

    reward: Reward
    deadline: float  # seconds for one call
    retries: int  # calls after the first
    told: Callable[[str], None]  # called with what went wrong before each retry

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        """Judges as the reward does. Raises what its last call raised, `DeadlineExceeded` when that took too long."""
        for attempt in range(self.retries):
            try:
                return self._ask(answered)
            except Exception as error:
                if isinstance(error, UserError) and error.__cause__ is None:
                    raise
                what = f"{type(self.reward).__name__}: {type(error).__name__}: {error}"
                log.warning("%s; retrying", what)
                self.told(what)
                threading.Event().wait(_FIRST_PAUSE * 2**attempt)
        return self._ask(answered)

    def _ask(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        """Make one call, in a thread, and wait for it at most until the deadline."""
        judging = beside("judge", self.reward.judge, answered)
        if not wait([judging], self.deadline).done:
            raise DeadlineExceeded(
                f"waited {self.deadline:g} s for the reward {type(self.reward).__name__} to judge {len(answered)} "
                "answers: make it faster, or raise --run.reward-deadline"
            )
        return judging.result()


def beside(name: str, act: Callable[..., T], *given: Any) -> Future[T]:
    """Call in a thread of its own, which cannot keep the process alive."""
    found: Future[T] = Future()

    def call() -> None:
        try:
            found.set_result(act(*given))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks
            found.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return found
