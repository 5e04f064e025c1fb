"""The `processes` runtime: the trainer and each searcher in its own process on this machine. The embedded default.

Down through the journal, up through versioned safetensors; nothing listens on a port. The driver (this process) holds
one end of a pipe to each part, which ends when it is gone; what it does with the parts is in `driving`.
"""

from __future__ import annotations

from dataclasses import fields

from tba.runtime.child import Process
from tba.runtime.driving import Driver
from tba.runtime.ranked import RankedTrainer


class Processes(Driver):
    """One run on this machine: `go()` until it is finished, stopped or failed."""

    def start(self, name: str) -> Process:
        """As a child process; a trainer of several ranks as several."""
        ranks, threads = self.recipe.trainer.ranks, self.recipe.run.threads
        parts = {type(getattr(self.recipe, f.name)).__module__ for f in fields(self.recipe)}
        loads = tuple(sorted(module for module in parts if module.startswith("tba.")))
        if name == "trainer" and ranks > 1:
            return RankedTrainer(name, self.run, threads, loads=loads, ranks=ranks)
        return Process(name, self.run, threads, loads=loads)
