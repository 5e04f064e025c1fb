"""Fetch the next batch while this one is computed.

Invariant: exactly one batch is fetched ahead, in one thread, in the order the source gives them; what the source
raises is raised to whoever asks for that batch. So a batch is older by at most one update than one sampled on demand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue

from tba.errors import DeadlineExceeded
from tba.train.batches import BatchSource, Fetched


class Prefetch:
    """A `BatchSource` one batch ahead of another, whose `next` is called in a thread of its own from now on.

    The thread consumes requests, one for each `next`; it waits for them, and within the source for data. `interrupt`
    is called by `close` and should make the source's wait end (by returning or raising).
    """

    def __init__(self, source: BatchSource, deadline: float, interrupt: Callable[[], None] | None = None) -> None:
        self.source = source
        self.deadline = deadline  # seconds that `next` and `close` may wait
        self._interrupt = interrupt
        self._requests: SimpleQueue[Future[Fetched] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="prefetch", daemon=True)
        self._thread.start()
        self._ahead = self._request()

    def next(self) -> Fetched:
        """The batch fetched ahead; the fetching of another begins.

        Raises what the source raised, and `DeadlineExceeded` when there is no batch within the deadline.
        """
        try:
            fetched = self._ahead.result(self.deadline)
        except TimeoutError as error:
            if self._ahead.done():  # the source's own
                raise
            raise DeadlineExceeded(
                f"no batch came within {self.deadline:g} s from {type(self.source).__name__}; "
                "the searchers' logs tell whether trajectories are being made"
            ) from error
        self._ahead = self._request()
        return fetched

    @property
    def ahead(self) -> Fetched | None:
        """The batch that was fetched ahead, if it is there. Until the next request the source is left alone."""
        return self._ahead.result() if self._ahead.done() and self._ahead.exception() is None else None

    def again(self) -> None:
        """Drop the batch that was fetched ahead, which has to be there; the fetching of another begins."""
        self._ahead = self._request()

    def ready(self, seconds: float) -> bool:
        """Whether `next` would give a batch, or raise what the source raised, at once; waits so long to find out."""
        wait([self._ahead], seconds)
        return self._ahead.done()

    def close(self) -> Fetched | None:
        """End the thread; the batch that was fetched ahead and is now dropped, if there is one.

        Raises `DeadlineExceeded` when the source holds on.
        """
        self._requests.put(None)
        if self._interrupt is not None:
            self._interrupt()
        self._thread.join(self.deadline)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{type(self.source).__name__} did not let go of a batch in {self.deadline:g} s")
        return self.ahead

    def _request(self) -> Future[Fetched]:
        request: Future[Fetched] = Future()
        self._requests.put(request)
        return request

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request.set_result(self.source.next())
            except BaseException as error:  # noqa: BLE001 - carried to the caller of next, which raises it
                request.set_exception(error)
