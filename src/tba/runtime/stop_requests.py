"""Ctrl-C as a request: what is under way is ended where it is whole.

Invariant: inside `stop_requests` the first Ctrl-C (or SIGTERM) changes only what the function answers; a second one is
a KeyboardInterrupt wherever the program is. The signal's number is kept for the exit code.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Calling it says whether a stop was requested."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that requested it
        self._event = threading.Event()

    def __call__(self) -> bool:
        return self._event.is_set()

    def request(self, number: int) -> None:
        self.number = number
        self._event.set()

    @property
    def exit_code(self) -> int:
        """The exit code of what this signal ended: 130 for Ctrl-C, 143 for SIGTERM, like in shells."""
        return 128 + (self.number or signal.SIGINT)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Yields a function that says whether a stop was requested. Outside the main thread no signal is handled."""
    stop = StopRequest()

    def handle_signal(number: int, frame: object) -> None:
        if stop():
            raise KeyboardInterrupt
        stop.request(number)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former_handlers = [signal.signal(number, handle_signal) for number in _SIGNALS]
    try:
        yield stop
    finally:
        for number, former_handler in zip(_SIGNALS, former_handlers, strict=True):
            signal.signal(number, former_handler)
