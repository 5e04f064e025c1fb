"""Ctrl-C as a request: what is under way is brought to an end where it is whole.

Invariant: inside `stop_requests` the first Ctrl-C (or SIGTERM) changes nothing but the answer; a second one is a
KeyboardInterrupt wherever the program is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether a stop was asked for. Outside the main thread no signal is listened to."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = [signal.signal(number, ask) for number in _SIGNALS]
    try:
        yield asked.is_set
    finally:
        for number, former in zip(_SIGNALS, before, strict=True):
            signal.signal(number, former)
