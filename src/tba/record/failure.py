"""`failure.json`: the error that ended a run early. A run has it or a summary, not both.

Invariant: the kind is that of the error where it arose, also when a part in another process raised it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tba.errors import UserError
from tba.json_input import read_json
from tba.record.jsonl import write_json
from tba.record.metrics import read_last

FILE = "failure.json"


@dataclass(frozen=True, slots=True)
class Failure:
    """Holds the error that ended a run."""

    kind: str  # the error's class: NonFiniteLoss, DeadlineExceeded, ...
    message: str
    step: int  # updates that were recorded before it

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}"

    @classmethod
    def record(cls, directory: Path, error: BaseException | str, explained: bool = False) -> Failure:
        """Write what ended the run in `directory`: the error that a part has left, or else, or where it is explained,
        `error`.
        """
        kind, message = (error, error) if isinstance(error, str) else (type(error).__name__, str(error))
        for file in () if explained else sorted((directory / "logs").glob("*.error.json")):
            with suppress(UserError):
                error_fields = read_json(file, "it is passed over", kind=str, message=str)
                kind, message = error_fields["kind"], error_fields["message"]
        last_line = read_last(directory)
        failure = cls(kind, message, int(last_line["step"]) if last_line else 0)
        write_json(directory / FILE, asdict(failure))
        return failure

    @classmethod
    def read(cls, directory: Path) -> Failure | None:
        """Returns what ended the run in `directory`; None when nothing did. Raises `UserError` when the file is
        damaged.
        """
        path = directory / FILE
        if not path.exists():
            return None
        failure: Failure = read_json(path, "it says why a run failed, and can be removed", cls)
        return failure
