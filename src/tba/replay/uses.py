"""Which trajectories were used, batch by batch, in a file of the trainer's own.

Invariant: one line per batch, a JSON list of uids (about 35 bytes per use), appended and flushed to disk in order by
one background thread, so that no optimizer step waits for the disk. A batch that was not trained after all is taken
back by a line that says so. A line that was cut off by a crash is no line.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from queue import Full, Queue

from tba.errors import DeadlineExceeded

_BATCHES = 256  # how many may wait for the disk


class UseLog:
    """Appends to `path`. The thread consumes batches from a queue; `record` unblocks it, `close` ends it."""

    def __init__(self, path: Path, deadline_s: float = 30.0) -> None:
        self.path = path
        self.deadline_s = deadline_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self.size = self._file.tell()  # bytes, with all that was recorded
        self._queue: Queue[bytes | threading.Event | None] = Queue(_BATCHES)
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="uses", daemon=True)
        self._thread.start()

    def record(self, uids: Sequence[str]) -> None:
        """One batch. Raises `OSError` when an earlier one could not be written, `DeadlineExceeded` on a stuck disk."""
        self._append(list(uids))

    def take_back(self, uids: Sequence[str]) -> None:
        """A recorded batch that was not trained. Raises as `record` does."""
        self._append({"taken_back": list(uids)})

    def _append(self, batch: list[str] | dict[str, list[str]]) -> None:
        if self._error is not None:
            raise self._error
        line = json.dumps(batch, separators=(",", ":")).encode() + b"\n"
        self._put(line)
        self.size += len(line)

    def sync(self) -> None:
        """Returns once all that was recorded is on disk. Raises as `record` does."""
        written = threading.Event()
        self._put(written)
        if not written.wait(self.deadline_s):
            raise self._late()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Returns once everything is on disk. Raises as `record` does."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(self.deadline_s)
            if self._thread.is_alive():
                raise self._late()
        self._file.close()
        if self._error is not None:
            raise self._error

    def _put(self, line: bytes | threading.Event | None) -> None:
        try:
            self._queue.put(line, timeout=self.deadline_s)
        except Full as error:
            raise self._late() from error

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"waited {self.deadline_s:g} s for {self.path} to be written to disk")

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
            elif self._error is None:
                try:
                    self._file.write(line)
                    self._file.flush()
                    os.fsync(self._file.fileno())
                except OSError as error:
                    self._error = error


def read_uses(path: Path) -> Counter[str]:
    """How often each trajectory was used; none when there is no file."""
    uses: Counter[str] = Counter()
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue
                batch = json.loads(line)
                if isinstance(batch, dict):
                    uses.subtract(batch["taken_back"])
                else:
                    uses.update(batch)
    return uses


def cut_uses(path: Path, size: int) -> None:
    """Forget what was recorded after the file had `size` bytes. Raises `ValueError` when it is shorter than that."""
    with path.open("ab") as file:
        if file.tell() < size:
            raise ValueError(f"{path} has {file.tell()} bytes, it had {size} when the state was saved")
        file.truncate(size)
