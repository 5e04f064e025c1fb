"""`samples.jsonl`: a few trajectories of some steps, for people to read.

Invariant: what is written is what was trained on, unedited; without text (a setting) no prompt and no answer is
written, only keys, lengths and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tba.record.jsonl import JsonLines, read_lines
from tba.types import Json, Trajectory

FILE = "samples.jsonl"


class SampleWriter:
    """Appends `count` trajectories of every `every`th step's batch, the first step's included, spread over its rows."""

    def __init__(self, directory: Path, every: int = 20, count: int = 4, text: bool = True) -> None:
        self._lines = JsonLines(directory / FILE)
        self.every = every
        self.count = count
        self.text = text

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """The chosen ones of `trajectories`, the batch of optimizer step `step` (from 1), if it is its turn."""
        if step != 1 and step % self.every:
            return
        count = min(self.count, len(trajectories))
        for i in range(count):
            self._lines.append(self._line(step, trajectories[i * len(trajectories) // count]))

    def close(self) -> None:
        self._lines.close()

    def _line(self, step: int, t: Trajectory) -> dict[str, Json]:
        said = {"prompt": t.prompt.text, "completion": t.completion.text} if self.text else {}
        return {
            "step": step,
            "prompt_key": t.prompt.key,
            **said,
            "reward": t.reward,
            "reward_parts": t.reward_parts,
            "version": t.version,
            "length": t.length,
            "stop_reason": t.completion.stop_reason,
            "log_reference": float(t.log_reference.sum()),
            "uid": t.uid,
            "searcher": t.provenance.get("searcher"),
        }


def read_samples(directory: Path) -> list[dict[str, Json]]:
    """A run's samples, in the order written; none when it has none yet."""
    return read_lines(directory / FILE)
