"""A trainer of several ranks, seen from the driver: processes that live and end together.

Invariant: it is one part. Once any rank has ended other than well the others are ended too, and what the first of them
to fail says is the part's failure (the others fail because it is gone). It runs until all ranks have ended.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tba.runtime.child import Process
from tba.runtime.leading import STORE, name_of_rank


@dataclass
class RankedTrainer(Process):
    """Rank 0 is this part itself; the others are its `followers`, which have no sign of life but its."""

    ranks: int = 2
    followers: list[Process] = field(init=False)
    _culprit: Process | None = None
    _folder: tempfile.TemporaryDirectory[str] = field(init=False)

    def __post_init__(self) -> None:
        self.followers = []
        super().__post_init__()

    def start(self) -> None:
        self._culprit = None
        self._folder = tempfile.TemporaryDirectory(prefix="tba-ranks-", ignore_cleanup_errors=True)
        self.environment = {STORE: str(Path(self._folder.name) / "store")}  # where they find each other
        for rank in range(self.ranks):  # what an earlier life said
            self.run.error(name_of_rank(rank)).unlink(missing_ok=True)
        super().start()
        if self.followers:
            for follower in self.followers:
                follower.environment = self.environment
                follower.start_again()
            return
        names = [name_of_rank(rank) for rank in range(1, self.ranks)]
        self.followers = [
            Process(name, self.run, self.threads, environment=self.environment, loads=self.loads) for name in names
        ]

    @property
    def code(self) -> int | None:
        """That of the rank that failed; None while any goes on; 0 once all have ended well."""
        codes = [(part, part.process.poll()) for part in (self, *self.followers)]
        if self._culprit is None and (failed := [(part, code) for part, code in codes if code]):
            self._culprit = min(failed, key=lambda pair: (pair[1] >= 0, _when(pair[0])))[0]
            self._end()
        if self._culprit is not None:
            return self._culprit.process.poll()
        return None if any(code is None for _, code in codes) else 0

    def kill(self) -> None:
        super().kill()
        for follower in self.followers:
            follower.kill()
        self._folder.cleanup()

    def failure(self) -> Exception:
        culprit = self._culprit
        return super().failure() if culprit is None or culprit is self else culprit.failure()

    def _end(self) -> None:
        """What is left of it."""
        for part in (self, *self.followers):
            part.process.kill()
            part.process.wait()


def _when(part: Process) -> float:
    """When it left its error; the end of time if it did not."""
    try:
        return part.run.error(part.name).stat().st_mtime
    except OSError:
        return float("inf")
