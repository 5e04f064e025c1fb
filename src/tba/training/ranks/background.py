"""Runs a rank's task while the next steps are computed: sending weights, or writing a checkpoint.

Invariant: one task at a time. Its error is raised by the next `wait` or `raise_error`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tba.errors import DeadlineExceeded


@dataclass
class Background:
    """Runs one task after the other in a thread."""

    name: str
    deadline: float | None = None  # seconds that `wait` waits; None: the task has its own deadlines
    timeout_message: str = ""  # who waits for what, beyond the deadline
    _thread: threading.Thread | None = None
    _errors: list[Exception] = field(default_factory=list)

    def start(self, task: Callable[[], object]) -> None:
        """Run `task` in a thread, once the task before has ended."""
        self.wait()

        def run() -> None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()

    def raise_error(self) -> None:
        """Raise the task's error, if there is one; return at once."""
        if self._errors:
            raise self._errors.pop()

    def wait(self) -> None:
        """Wait until the task is done. Raises its error, and `DeadlineExceeded`."""
        if self._thread is not None:
            self._thread.join(self.deadline)
            if self._thread.is_alive():
                raise DeadlineExceeded(self.timeout_message)
            self._thread = None
        self.raise_error()
