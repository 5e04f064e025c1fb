"""Notices that a reward tries to use signals in a thread in which they do not work.

Only a process's main thread can set a handler; elsewhere `signal.signal` raises `ValueError`, which grading libraries
catch as if the answer were at fault (a time limit by `signal.alarm` begins with it). So the value of a call that tried
to is not to be trusted: such a function has to run in a main thread (`runtime/isolated.py`).

Invariant: within `watching_signals` an attempt in another than the main thread is noted, however the function came by
`signal.signal`, since that looks `_signal.signal` up with each call. `alarm` and `setitimer` would end the process, or
raise in its main thread: there they are refused as `signal.signal` is. What this cannot see: a thread that the function
starts itself, an `alarm` that was imported by name before (its handler is seen all the same), and a function that looks
first in which thread it is and then does without a limit.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any


@dataclass
class Watch:
    """Says what a call tried."""

    tried: bool = False  # to use signals, outside the main thread


_present: ContextVar[Watch | None] = ContextVar("watch", default=None)  # each task of a loop has its own
_begins = threading.Lock()
_low_level = importlib.import_module("_signal")
_patched: set[str] = set()


@contextmanager
def watching_signals() -> Iterator[Watch]:
    """Yields what says, at the end, whether this thread or task tried to use signals and could not."""
    if not _patched:
        with _begins:
            _patch()
    watch = Watch()
    before = _present.set(watch)
    try:
        yield watch
    finally:
        _present.reset(before)


def _patch() -> None:
    """Put functions that take note in the place of those of the signal module, once; they do the same."""
    if not _patched:
        _low_level.signal = _noting(_low_level.signal, refuses=False)  # type: ignore[attr-defined] # it refuses itself
        for name in ("alarm", "setitimer"):
            if hasattr(signal, name):
                noting = _noting(getattr(signal, name), refuses=True)
                for module in (_low_level, signal):
                    setattr(module, name, noting)
        _patched.update(("signal", "alarm", "setitimer"))


def _noting(function: Callable[..., Any], refuses: bool) -> Callable[..., Any]:
    @wraps(function)
    def noting(*arguments: Any) -> Any:
        watch = _present.get()
        if watch is not None and threading.current_thread() is not threading.main_thread():
            watch.tried = True
            if refuses:
                raise ValueError("signal only works in main thread of the main interpreter")
        return function(*arguments)

    return noting
