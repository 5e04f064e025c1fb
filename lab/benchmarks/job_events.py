"""What the benchmarks of submitted jobs share: waiting for a job's scheduler, and a row for each event."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

POLL = 0.5  # seconds between two looks at a scheduler, which tells nobody
EventWriter: TypeAlias = Callable[[list[object]], None]


def until(condition: Callable[[], object], purpose: str, deadline: float) -> None:
    """Wait until a condition holds. Raises `TimeoutError` after `deadline` seconds."""
    limit = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {deadline:g} s for {purpose}")
        time.sleep(POLL)


@contextmanager
def event_rows(path: Path) -> Iterator[EventWriter]:
    """Yields what writes a row to a new file and to the terminal at once; its first is the names of the columns."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")

        def write(row: list[object]) -> None:
            writer.writerow(row)
            file.flush()
            print(row, flush=True)

        write(["event", "step", "rows", "lost", "note"])
        yield write
