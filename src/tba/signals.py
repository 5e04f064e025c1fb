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
class SignalUse:
    """Says whether a call tried to use signals outside the main thread."""

    was_tried: bool = False


_current_use: ContextVar[SignalUse | None] = ContextVar("watch", default=None)  # each task of a loop has its own
_patch_lock = threading.Lock()
_low_level = importlib.import_module("_signal")
_patched_names: set[str] = set()


@contextmanager
def watching_signals() -> Iterator[SignalUse]:
    """Yields a record that says, at the end, whether this thread or task tried to use signals and could not."""
    if not _patched_names:
        with _patch_lock:
            _patch()
    signal_use = SignalUse()
    token = _current_use.set(signal_use)
    try:
        yield signal_use
    finally:
        _current_use.reset(token)


def _patch() -> None:
    """Replaces functions of the signal module, once, by functions that do the same and note the attempt."""
    if not _patched_names:
        _low_level.signal = _with_note(_low_level.signal, refuses=False)  # type: ignore[attr-defined] # it refuses itself
        for name in ("alarm", "setitimer"):
            if hasattr(signal, name):
                function = _with_note(getattr(signal, name), refuses=True)
                for module in (_low_level, signal):
                    setattr(module, name, function)
        _patched_names.update(("signal", "alarm", "setitimer"))


def _with_note(function: Callable[..., Any], refuses: bool) -> Callable[..., Any]:
    @wraps(function)
    def note_and_call(*arguments: Any) -> Any:
        signal_use = _current_use.get()
        if signal_use is not None and threading.current_thread() is not threading.main_thread():
            signal_use.was_tried = True
            if refuses:
                raise ValueError("signal only works in main thread of the main interpreter")
        return function(*arguments)

    return note_and_call
