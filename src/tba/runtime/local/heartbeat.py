"""Each worker's heartbeat, and the driver's watch over it: a worker that hangs is found, however it hangs.

Invariant: a worker that is alive asks now and then whether it is to stop, and each time that is its heartbeat (the
modification time of a file, updated each time); the driver only compares these times with one another, never with a
clock, and measures silence by a monotonic clock.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_BEAT_SECONDS = 0.5  # between two heartbeats at least


def heartbeat_file(run: Path, worker: str) -> Path:
    """Returns the file whose modification time is the worker's heartbeat."""
    return run / "logs" / f"{worker}.pulse"


@dataclass
class Heartbeat:
    """A worker's heartbeat, as the worker gives it: call `beat` as often as you like."""

    path: Path
    _last_beat: float = -_BEAT_SECONDS

    def beat(self) -> None:
        """Give a heartbeat; nearly always free. A disk that is full or gone is reported elsewhere."""
        now = time.monotonic()
        if now - self._last_beat < _BEAT_SECONDS:
            return
        self._last_beat = now
        with suppress(OSError):
            self.path.touch()
            # differs from the value before in any case
            os.utime(self.path, ns=(time.monotonic_ns(), time.monotonic_ns()))


@dataclass
class SilenceWatch:
    """Measures, in the driver, how long a worker has been silent since its start or its last heartbeat."""

    path: Path
    _newest_heartbeat: int | None = None
    _silent_since: float = field(default_factory=time.monotonic)
    _former_heartbeat: int | None = None  # the heartbeat that an earlier life of the worker left

    def __post_init__(self) -> None:
        self._newest_heartbeat = self._former_heartbeat = self._modification_time()

    @property
    def has_heartbeat(self) -> bool:
        """Returns whether the worker has given a heartbeat since its start."""
        return self._modification_time() != self._former_heartbeat

    def silence(self) -> float:
        """Returns the seconds since the last heartbeat, or since the start."""
        heartbeat = self._modification_time()
        if heartbeat != self._newest_heartbeat:
            self._newest_heartbeat, self._silent_since = heartbeat, time.monotonic()
        return time.monotonic() - self._silent_since

    def _modification_time(self) -> int | None:
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return None
