"""Publishing in the background while the trainer computes the next step: a thread writes the weights.

Invariant: `hold` is called before the next update, so that nobody changes weights that are still to be read. Of a GPU's
they are copied to the host first (`device_to_host`), and the update waits for that on the GPU; those on the host are
written from where they are, and `hold` waits for that. One version leaves at a time: while it does, `busy` is true, and
`publish` would wait. What is requested in the meantime
(pins) is executed after the writing, in order. What fails in the thread is raised by the next call that waits for it,
or by `hold`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from tba.device_to_host import HostCopies
from tba.errors import DeadlineExceeded
from tba.protocols import Manifest, PublishedWeights
from tba.streaming import TensorStream
from tba.types import Version
from tba.weights.directory import WeightDirectory

if TYPE_CHECKING:
    import torch


class BackgroundPublisher:
    """Publishes into a `WeightDirectory` in a thread of its own."""

    def __init__(self, directory: WeightDirectory, deadline: float, copies: HostCopies | None = None) -> None:
        self._directory = directory
        self._deadline = deadline  # seconds that `settle` may wait
        self._copies = copies or HostCopies()
        self._hold_weights: Callable[[], bool] = lambda: False  # of the version published last: `Streamed.hold`
        self._thread = ThreadPoolExecutor(1, "publish")
        self._jobs: list[Future[None]] = []
        self._pending_pins: list[tuple[Version, str]] = []  # pins of versions that are still being written

    def publish(self, weights: Mapping[str, torch.Tensor], version: Version, manifest: Manifest) -> None:
        """Start to publish `weights` once the version before is written; `hold` them before they change."""
        self.settle()
        is_stream = isinstance(weights, TensorStream)
        leaving_weights = (
            weights
            if is_stream
            else self._copies.begin_copy(weights, self._directory.dtype, lambda: self._directory.reserve(weights))
        )
        self._hold_weights = leaving_weights.hold if isinstance(leaving_weights, TensorStream) else lambda: False
        self._run_later(lambda: self._directory.publish(leaving_weights, version, manifest))

    @property
    def busy(self) -> bool:
        """Returns whether a version is still being written."""
        return any(not job.done() for job in self._jobs)

    def hold(self) -> None:
        """Delay the next update until the weights have been read: on the device, where they are copied from it, else by
        waiting here. Raises what `settle` does.
        """
        if not self._hold_weights() or any(job.done() and job.exception() for job in self._jobs):
            self.settle()

    def settle(self) -> None:
        """Wait for the weights that are still being written. Raises the error of writing, and `DeadlineExceeded`."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            try:
                job.result(self._deadline)
            except TimeoutError as error:
                if job.done():  # the job's own error, not this wait's
                    raise
                raise DeadlineExceeded(
                    f"the weights had not been written into {self._directory.path} after {self._deadline:g} s"
                ) from error
        self._pending_pins.clear()

    def pin(self, version: Version, reason: str) -> None:
        """Pin a version, which may still be being written."""
        self._pending_pins.append((version, reason))
        self._run_later(lambda: self._directory.pin(version, reason))

    def pins(self, version: Version) -> list[str]:
        """Returns why a version is pinned, including pins that are still to be executed."""
        if all(job.done() for job in self._jobs):
            self.settle()
        return [*self._directory.pins(version), *(reason for v, reason in self._pending_pins if v == version)]

    def unpin(self, version: Version, reason: str) -> None:
        self._run_later(lambda: self._directory.unpin(version, reason))

    def versions(self) -> list[Version]:
        self.settle()
        return self._directory.versions()

    def newest(self) -> Version | None:
        self.settle()
        return self._directory.newest()

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        self.settle()
        return self._directory.newer_than(version)

    def at(self, version: Version) -> PublishedWeights:
        self.settle()
        return self._directory.at(version)

    def close(self) -> None:
        """Settle, close the directory, and end the thread."""
        try:
            self.settle()
            self._directory.close()
        finally:
            self._thread.shutdown(wait=False)

    def _run_later(self, action: Callable[[], None]) -> None:
        self._jobs.append(self._thread.submit(action))
