"""Has chat templates write texts. A template is a program of a model's maker: one that does not end is ended."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tba.errors import UserError

T = TypeVar("T")
TEMPLATE_SECONDS = 10.0  # for a template to write one chat, which takes milliseconds


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns the text that a tokenizer's template writes, given options of `apply_chat_template`. Raises what the
    template raises, and `UserError` when it does not end.
    """
    write = partial(tokenizer.apply_chat_template, list(messages), tokenize=False, **options)
    try:
        return str(_call_within(TEMPLATE_SECONDS, write))
    except TimeoutError as error:
        raise UserError(f"the model's chat template cannot write a prompt ({error}): give another model") from error


class _Overtime(BaseException):
    """Ends a call that takes too long; no `except Exception` on its way stops it."""


_DEADLINES: dict[int, float] = {}  # of calls with a limit, by their thread
_WATCHER = [threading.Thread()]  # the thread that ends overdue calls, while there are any calls


def _call_within(seconds: float, call: Callable[[], T]) -> T:
    """Returns the result of a call of Python code. Raises `TimeoutError` when it takes longer than `seconds`.

    The call runs in the present thread, since starting a thread would take ten times as long as a template does.
    """
    thread = threading.get_ident()
    _DEADLINES[thread] = time.monotonic() + seconds
    if not _WATCHER[0].is_alive():  # it has ended for lack of calls, or a fork has lost it
        _WATCHER[0] = threading.Thread(target=_end_overdue_calls, name="deadlines", daemon=True)
        _WATCHER[0].start()
    try:
        try:
            result = call()
        except _Overtime:
            raise
        except BaseException:
            _cancel_deadline(thread)
            raise
        _cancel_deadline(thread)
    except _Overtime:
        raise TimeoutError(f"no end after {seconds:g} s") from None
    return result


def _cancel_deadline(thread: int) -> None:
    """Removes the deadline of this thread. If its call is being ended already, waits for that, so that it does not end
    later code instead.
    """
    while _DEADLINES.pop(thread, None) is None:
        time.sleep(0.001)


def _end_overdue_calls() -> None:
    while True:
        while _DEADLINES:
            time.sleep(0.1)
            for thread, deadline in list(_DEADLINES.items()):
                if time.monotonic() > deadline and _DEADLINES.pop(thread, None) is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Overtime))
        _WATCHER[0] = threading.Thread()  # which is not alive: a call that comes from here on begins another
        if not _DEADLINES:  # else one came before that, and has seen this one alive
            return
