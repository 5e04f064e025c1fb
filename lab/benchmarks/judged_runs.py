"""Runs of `slow_judge.py` as their user would start them, bounded in seconds, and what they and the judge wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults import query_rows

import tba
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.replay.queries import count_rows
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import is_held
from tba_lab.judge import Call, read_calls

RECIPE = Path(__file__).with_name("slow_judge.py")
BARE = (
    *("--evaluation.every", "0", "--evaluation.problems", "20", "--evaluation.pass-k", "0"),
    *("--record.no-tensorboard", "--record.samples-per-batch", "0"),
)
PATIENCE = 240.0  # seconds that a run has to end in order once it was asked to
_LOOK = 0.1


@dataclass
class JudgedRun:
    """A run, its judge's log and the processes that have worked on it."""

    path: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stopped: float = 0.0  # when it ended, or was asked to, by `time.monotonic`

    @property
    def log(self) -> Path:
        """The folder of the judge's log."""
        return self.path.with_name(f"{self.path.name}-calls")

    @property
    def output(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    def train(self, *arguments: str, recipe: str = str(RECIPE)) -> None:
        place = ("--runs", str(self.path.parent), "--run-name", self.path.name, "--task.judge.log", str(self.log))
        self.start("train", recipe, *place, *arguments)

    def start(self, *arguments: str) -> None:
        """Start a command that works on the run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as file:
            command = [sys.executable, "-m", "tba", *arguments]
            self.processes.append(subprocess.Popen(command, stdout=file, stderr=file))

    def end(self, seconds: float, reached: Callable[[], bool] = lambda: False, look: float = 0.1) -> int:
        """Wait until it has ended; stop it in order after so many seconds, or once `reached()`, which is asked every
        `look` seconds. Returns its exit code; that of a run that does not obey is -9.
        """
        limit = time.monotonic() + seconds
        while self.processes[-1].poll() is None and time.monotonic() < limit and not reached():
            time.sleep(look)
        self.stopped = time.monotonic()
        if self.processes[-1].poll() is None:
            self.processes[-1].send_signal(signal.SIGINT)
        try:
            return self.processes[-1].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def kill(self) -> None:
        """Kill all processes of the run at once."""
        for process in self.processes:
            for pid in (process.pid, *descendants(process.pid)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()

    def until_free(self, seconds: float = PATIENCE) -> None:
        """Wait until nothing works on the run any longer."""
        limit = time.monotonic() + seconds
        while is_held(self.path):
            if time.monotonic() > limit:
                sys.exit(f"{self.path} is still worked on after {seconds:g} s")
            time.sleep(_LOOK)

    def rows(self) -> int:
        """Returns how many answers the journal has had."""
        return (count_rows(self.journal) or 0) if self.journal.exists() else 0

    def answers(self) -> Counter[tuple[str, str]]:
        """Returns how often the journal has each answer, by prompt and text."""
        return Counter((t.prompt.text, t.completion.text) for t in tba.open_run(self.path).trajectories())

    def counts(self) -> dict[str, int]:
        """Returns generated, rejected and in flight (in trajectories): of the summary, or without one of the journal's
        counters.
        """
        if (summary := Summary.read(self.path)) is not None:
            ledger = summary.trajectories
            return {"generated": ledger.generated, "rejected": ledger.rejected, "in_flight": ledger.in_flight_at_stop}
        counters = dict(query_rows(self.journal, "SELECT name, sum(value) FROM counters GROUP BY name"))
        return {name: int(counters.get(f"{name}_trajectories", 0)) for name in ("generated", "rejected", "in_flight")}

    def calls(self) -> list[Call]:
        return read_calls(self.log)

    def updates(self) -> list[dict[str, float]]:
        """Returns the metrics of each update, with `at`: when it was made, by `time.monotonic`. (Of a run that was
        never resumed.)
        """
        clock = RunDirectory.open(self.path).facts["clock"]
        began = clock["began"] - clock["before"]
        return [{**row, "at": began + row["wall_seconds"]} for row in read_metrics(self.path)]


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has made, and those that these have ledger."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    below: list[int] = []
    level: Sequence[int] = [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        below += level
    return below


def judge(seconds: float, concurrency: int, *fields: str) -> tuple[str, ...]:
    """Returns the fields of a judge."""
    return ("--task.judge.seconds", f"{seconds:g}", "--task.judge.concurrency", str(concurrency), *fields)
