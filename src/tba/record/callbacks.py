"""A caller's own functions, called with what a run records, in the caller's process.

Invariant: each step and each figure is told once, in its order, also when a trainer that was restarted records steps
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.errors import TbaError
from tba.record import evaluations, metrics
from tba.record.jsonl import NewLines
from tba.types import Evaluation, Json, Version
from tba.user_code import user_code_error


@dataclass
class Callbacks:
    """Calls one function with each optimizer step's metrics and another with each held-out figure, where they are set.

    Raises `UserError` for whatever the functions raise.
    """

    on_step: Callable[[Mapping[str, Json]], object] | None = None
    on_evaluation: Callable[[Evaluation], object] | None = None
    _last_step: int = field(default=0, init=False)  # the last that was reported
    _reported: set[tuple[Version, str]] = field(default_factory=set, init=False)
    _files: dict[str, NewLines] = field(default_factory=dict, init=False)

    def notify(self, run: Path) -> None:
        """Call the functions with what has been recorded since the last call."""
        if self.on_step is not None:
            for row in self._read_new(run, metrics.FILE, metrics.parse_step):
                if row["step"] > self._last_step:
                    self._last_step = row["step"]
                    _call("on_step", self.on_step, row)
        if self.on_evaluation is not None:
            for figure in self._read_new(run, evaluations.FILE, evaluations.parse_evaluation):
                if (figure.version, figure.metric) not in self._reported:
                    self._reported.add((figure.version, figure.metric))
                    _call("on_evaluation", self.on_evaluation, figure)

    def _read_new(self, run: Path, file: str, parse: Callable[[dict[str, Json]], Any]) -> list[Any]:
        return self._files.setdefault(file, NewLines(run / file, parse)).read()[1]


def _call(name: str, function: Callable[[Any], object], argument: Any) -> None:
    try:
        function(argument)
    except TbaError:
        raise
    except (Exception, SystemExit) as error:
        raise user_code_error(name, error) from error
