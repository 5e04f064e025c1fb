"""TensorBoard events of a run, written without torch or TensorFlow.

Invariant: the same numbers as `metrics.jsonl`, under the same names, by optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIRECTORY = "tensorboard"


class TensorBoardEvents:
    """Writes scalars; TensorBoard's own thread flushes them every few seconds, `close` at once."""

    def __init__(self, directory: Path) -> None:
        # half a second to load, and not needed by commands that only read a run
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        path = directory / DIRECTORY
        path.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(path), flush_secs=10)

    def write(self, step: int, seconds_since_epoch: float, metrics: Mapping[str, float]) -> None:
        """The finite ones of `metrics` at an optimizer step."""
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=seconds_since_epoch, summary=summary))

    def close(self) -> None:
        self._writer.close()
