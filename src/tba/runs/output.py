"""Says where a command writes what it makes: an option of many commands, those of applications too.

Invariant: nothing heavy is imported here, so that `tba COMMAND --help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError


@dataclass(frozen=True)
class OutOptions:
    """Says where what is made is written."""

    out: Path | None = None  # the folder to write

    def new_folder(self) -> Path:
        """Returns the folder to write. Raises `UserError` when it exists and is not empty."""
        assert self.out is not None  # the command line has seen to it
        if self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise UserError(f"{self.out} is there already: choose another --out, or remove it")
        return self.out
