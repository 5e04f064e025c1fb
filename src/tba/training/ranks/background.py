"""Runs what a rank does while the next steps are computed: sending weights, or writing a checkpoint.

Invariant: one thing at a time. What fails in it is raised where it is next waited for, or looked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tba.errors import DeadlineExceeded


@dataclass
class Background:
    """A thread for one thing after the other."""

    name: str
    deadline: float | None = None  # seconds that `settle` waits; None: what is waited for has its own deadlines
    what: str = ""  # who waits for what, beyond the deadline
    _thread: threading.Thread | None = None
    _failed: list[Exception] = field(default_factory=list)

    def begin(self, act: Callable[[], object]) -> None:
        """Run `act` in a thread, once the one before has ended."""
        self.settle()

        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                self._failed.append(error)

        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Raise what has failed; returns at once."""
        if self._failed:
            raise self._failed.pop()

    def settle(self) -> None:
        """Wait until it is done. Raises what failed, and `DeadlineExceeded`."""
        if self._thread is not None:
            self._thread.join(self.deadline)
            if self._thread.is_alive():
                raise DeadlineExceeded(self.what)
            self._thread = None
        self.look()
