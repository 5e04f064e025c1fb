"""A call that tries to use signals in a thread is noticed, whatever it makes of the error."""

import asyncio
import signal
import threading
from collections.abc import Callable
from signal import signal as imported_before
from typing import Any

import pytest

from tba.signals import watching_signals


def in_a_thread(act: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    thread.join(60)
    return results[0]


def tried(function: Callable[[], Any]) -> bool:
    with watching_signals() as watch:
        function()
    return watch.was_tried


def limited() -> float:
    """Grade as libraries with a time limit do: their error is taken for a wrong answer."""
    try:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
    except Exception:  # noqa: BLE001 - as they do
        return 0.0
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0


def by_name() -> float:
    try:
        imported_before(signal.SIGALRM, signal.SIG_DFL)
    except ValueError:
        return 0.0
    return 1.0


def alarm_alone() -> float:
    try:
        signal.alarm(1)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    except ValueError:
        return 0.0
    return 1.0


def plain() -> float:
    return float(signal.getsignal(signal.SIGINT) is not None) + float(signal.strsignal(signal.SIGINT) is not None)


@pytest.mark.parametrize("function", [limited, by_name, alarm_alone])
def test_a_function_that_uses_signals_is_noticed_in_a_thread(function: Callable[[], float]) -> None:
    assert in_a_thread(lambda: tried(function))


def test_what_works_is_not_noticed() -> None:
    assert not tried(limited)  # in the main thread it works
    assert not in_a_thread(lambda: tried(plain))
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_of_calls_in_one_loop_only_the_culprit_is_noticed_and_none_after_the_watch() -> None:
    async def call(function: Callable[[], float]) -> bool:
        with watching_signals() as watch:
            await asyncio.sleep(0)
            function()
            await asyncio.sleep(0)
        return watch.was_tried

    async def several() -> list[bool]:
        return list(await asyncio.gather(call(plain), call(by_name), call(plain), call(limited)))

    assert in_a_thread(lambda: asyncio.run(several())) == [False, True, False, True]
    assert in_a_thread(lambda: (tried(by_name), tried(plain))) == (True, False)


def test_errors_and_values_of_the_signal_module_are_what_they_were() -> None:
    assert tried(plain) is False
    assert signal.alarm(0) == 0
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR2, before) is signal.SIG_IGN
    with pytest.raises(ValueError, match="signal only works in main thread"):
        _raised(in_a_thread(lambda: _error(lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN))))


def _error(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except ValueError as error:
        return error
    return None


def _raised(error: Exception | None) -> None:
    assert error is not None
    raise error
