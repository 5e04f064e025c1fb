"""Runs calls that mostly wait, several at once.

Invariant: results come back in the order of the calls; the first error ends the wait and is raised here, in the
calling thread. The threads are daemons, so that a call which never returns cannot keep a finished process alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

from tba.errors import DeadlineExceeded

T = TypeVar("T")


class _Outcome(Generic[T]):
    """Catches whatever one call raises, to be raised again in the calling thread."""

    value: T
    error: BaseException | None = None

    def __enter__(self) -> _Outcome[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self.error = error
        return True


def run_in_threads(
    calls: Sequence[Callable[[], T]],
    concurrency: int,
    deadline_seconds: float,
    describe_call: Callable[[int], str],
    setting: str = "`deadline_seconds`",
    use_caller: bool = True,
) -> list[T]:
    """Returns the results of `calls`; at most `concurrency` of them run at once.

    With `use_caller`, one call at a time runs in the calling thread, and no deadline ends it. `setting` is the
    deadline's name for the user. Waits for the threads it starts. Raises what the first failing call raised, and
    `DeadlineExceeded`, with `describe_call(i)` of an unfinished call, when all take more than `deadline_seconds`.
    """
    if use_caller and (concurrency == 1 or len(calls) == 1):
        return [call() for call in calls]
    pending_indices: SimpleQueue[int] = SimpleQueue()
    outcomes: SimpleQueue[tuple[int, _Outcome[T]]] = SimpleQueue()
    stop = threading.Event()
    for index in range(len(calls)):
        pending_indices.put(index)

    def serve() -> None:
        while not stop.is_set():
            try:
                index = pending_indices.get_nowait()
            except Empty:
                return
            outcome: _Outcome[T] = _Outcome()
            with outcome:
                outcome.value = calls[index]()
            outcomes.put((index, outcome))

    for _ in range(min(concurrency, len(calls))):
        threading.Thread(target=serve, name="reward", daemon=True).start()
    results: dict[int, T] = {}
    deadline = time.monotonic() + deadline_seconds
    try:
        while len(results) < len(calls):
            try:
                index, outcome = outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                call_index = next(i for i in range(len(calls)) if i not in results)
                raise DeadlineExceeded(
                    f"waited {deadline_seconds:g} s for {describe_call(call_index)}: {len(calls) - len(results)} of "
                    f"{len(calls)} calls are unfinished, so raise {setting} or make the calls faster"
                ) from None
            if outcome.error is not None:
                raise outcome.error
            results[index] = outcome.value
    finally:
        stop.set()
    return [results[i] for i in range(len(calls))]
