"""The `processes` runtime: the trainer and each searcher in its own process on this machine. The embedded default.

Down through the journal, up through versioned safetensors; nothing listens on a port but a trainer's
ranks, if there are several, on the loopback interface. The driver (this process) holds one end of a pipe to each part,
which ends when it is gone; what it does with the parts is in `driving`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from tba.runtime.child import Process
from tba.runtime.driving import Driver, Part
from tba.runtime.leading import STORE
from tba.runtime.ranked import RankedPart
from tba.train.ranks import name_of_rank


class Processes(Driver):
    """One run on this machine: `go()` until it is finished, stopped or failed."""

    def start(self, name: str) -> Part:
        """As a child process; a trainer of several ranks as several."""
        if name == "trainer" and self.recipe.trainer.ranks > 1:
            return RankedPart(self._ranks, _first_to_fail)
        return self._process(name)

    def _process(self, name: str, attempt: int = 0, environment: dict[str, str] | None = None) -> Process:
        parts = {type(getattr(self.recipe, f.name)).__module__ for f in fields(self.recipe)}
        loads = tuple(sorted(module for module in parts if module.startswith("tba.")))
        return Process(name, self.run, self.recipe.run.threads, attempt, environment or {}, loads)

    def _ranks(self, attempt: int, ends: ExitStack) -> list[Process]:
        """Of one life of the trainer; they find each other over a file of its own."""
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="tba-ranks-", ignore_cleanup_errors=True))
        names = [name_of_rank(rank) for rank in range(self.recipe.trainer.ranks)]
        for name in names:  # what an earlier life said
            self.run.error(name).unlink(missing_ok=True)
        return [self._process(name, attempt, {STORE: str(Path(folder) / "store")}) for name in names]


def _first_to_fail(failed: Sequence[Process], more_to_learn: bool) -> Process:
    """A rank that died; else the one that left its error first."""
    return min(failed, key=lambda part: ((part.code or 0) >= 0, _when(part)))


def _when(part: Process) -> float:
    """When it left its error; the end of time if it did not."""
    try:
        return part.run.error(part.name).stat().st_mtime
    except OSError:
        return float("inf")
