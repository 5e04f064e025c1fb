"""What a step, a round and a look at a run read in a long run: it must not grow with the run.

    python lab/benchmarks/growth.py [--rows 1000,100000,1000000] [--times 40] [--steps 2000] [--folder DIR]

A run of the enumerable toy (`tests/toy`), in a process of its own, whose journal has been filled with --rows
trajectories (a tenth as many prompt outcomes and lines of metrics.jsonl, a thousandth as many evaluations). Searcher
and trainer then alternate, as in the inline runtime, and each is measured:

step         an optimizer step, its record, draining new trajectories, and the checks of counts
checkpoint   all that is saved besides the weights
round        a searcher's round: prompts leased by their posterior, a check for weights, 64 answers written
look         the live view's figures; the driver's check of who has joined and who holds the run

statements   of SQLite, all connections
instructions of SQLite's virtual machine, a few for every row that is visited
bytes        read from files (rchar of /proc/self/io), of SQLite in pages of 8 kB
lines        of JSON that were parsed

Then what is read once and has to grow: searcher and trainer start and read what is there, another searcher joins and
makes a round, a live view starts, `tba show`. Last, --steps steps of one run: memory, open descriptors, bytes written.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tba.evaluation.accuracy import EvaluationSettings
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.record.evaluations import EvaluationWriter
from tba.record.metrics import MetricsWriter
from tba.record.recorder import RecordSettings
from tba.record.run_record import RunRecord
from tba.record.show import show
from tba.replay.buffer import BufferSettings
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed
from tba.rollout.prompts import PromptSettings
from tba.runtime.elastic import JoinedSearchers
from tba.runtime.prompting import prompts_of
from tba.runtime.reporting import RunProgress
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import is_held
from tba.runtime.searcher_loop import SearcherLoop, start_searching
from tba.runtime.trainer_loop import TrainerLoop, start_training
from tba.schedules import Constant
from tba.training.optimizer import OptimizerSettings
from tba.types import Completion, Evaluation, StopReason, Trajectory, Version

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from toy.model import TabularModel
from toy.policy import TabularTask

task = TabularTask(prompts=12)
recipe = Recipe(
    name="growth",
    description="an enumerable toy that does all that a run may do at each step and round",
    task=task,
    model=TabularModel(task),
    objective=TrajectoryBalance(beta=Constant(0.5)),
    exploration=Fixed(),
    optimizer=OptimizerSettings(lr=0.05),
    prompts=PromptSettings(selection="posterior"),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.5),
        pacing=Pacing(warm_up=100),
        buffer=BufferSettings(per_prompt=10_000, distinct=False),
    ),
    evaluation=EvaluationSettings(every=0, problems=1),
    record=RecordSettings(),
    steps=1_000_000,
    reference_reset=100_000,  # not within what is measured: but scores are asked for
    groups_per_step=2,
    group_size=16,
    samples_per_prompt=32,
    prompts_per_round=2,
    sync_every=5,
)
# rounds, since what flows looks for newer weights by the clock
recipe = replace(recipe, run=replace(recipe.run, checkpoint_every=0, rounds=True))
SHARE = 10  # trajectories to a line of metrics.jsonl, and to an outcome of a prompt
EVALUATED = 1000  # and to a finished evaluation
MARKS = 8  # times in a run of --steps that its memory and descriptors are looked at
AT_ONCE = 2000  # trajectories put in one transaction


class Counting:
    """Inside, every connection to SQLite counts its statements and their instructions."""

    def __init__(self) -> None:
        self.statements = self.instructions = self.lines = 0
        self.on, self._every = False, 1
        self._connections: list[sqlite3.Connection] = []
        self._connect, self._loads = sqlite3.connect, json.loads

    def __enter__(self) -> Counting:
        connect: Any = self._connected  # sqlite3's own has overloads
        sqlite3.connect, json.loads = connect, self._loaded
        return self

    def __exit__(self, *_: object) -> None:
        sqlite3.connect, json.loads = self._connect, self._loads

    @contextmanager
    def counted(self, every: int = 1) -> Iterator[dict[str, float]]:
        """What is done in the block; there once it is over. Instructions are counted by so many at a time."""
        self._every = every
        for connection in self._connections:
            self._watch(connection)
        counts: dict[str, float] = {}
        self.on = True
        before, bytes_before, began = self._counts(), bytes_read(), time.perf_counter()
        try:
            yield counts
        finally:
            seconds, read = time.perf_counter() - began, bytes_read() - bytes_before
            self.on = False
            for connection in self._connections:
                self._leave(connection)
            counts |= {name: count - before[name] for name, count in self._counts().items()}
            counts |= {"bytes": read, "milliseconds": 1e3 * seconds}

    def _counts(self) -> dict[str, float]:
        return {"statements": self.statements, "instructions": self.instructions, "lines": self.lines}

    def _connected(self, *arguments: Any, **named: Any) -> sqlite3.Connection:
        connection = self._connect(*arguments, **named)
        self._connections.append(connection)
        if self.on:
            self._watch(connection)
        return connection

    def _watch(self, connection: sqlite3.Connection) -> None:
        try:
            connection.set_trace_callback(self._stated)
            connection.set_progress_handler(self._stepped, self._every)
        except sqlite3.ProgrammingError:  # closed meanwhile
            self._connections = [other for other in self._connections if other is not connection]

    def _leave(self, connection: sqlite3.Connection) -> None:
        try:
            connection.set_trace_callback(None)
            connection.set_progress_handler(None, 1)
        except sqlite3.ProgrammingError:
            self._connections = [other for other in self._connections if other is not connection]

    def _stated(self, statement: str) -> None:
        self.statements += 1

    def _stepped(self) -> int:
        self.instructions += self._every
        return 0

    def _loaded(self, *arguments: Any, **named: Any) -> Any:
        self.lines += self.on
        return self._loads(*arguments, **named)


def bytes_read() -> int:
    """By this process so far, of files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def made(path: Path, rows: int, **changes: Any) -> tuple[Recipe, RunDirectory]:
    """A run that has had so many trajectories, by the parts that write them."""
    own = replace(recipe, **changes)
    run = RunDirectory.create(path, str(Path(__file__).resolve()), [], own)
    prompts = prompts_of(own, own.model, "train")
    rng, seconds = np.random.default_rng(0), 0.0
    with JournalFollower(run.journal(own), position=2**62) as follower, JournalWriter(run.journal(own), "past") as past:
        for first in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - first)
            outcomes = [(int(p), 1.0, 31.0) for p in rng.integers(len(prompts), size=count // SHARE)]
            answers = [_answer(prompts[i % len(prompts)], first + i, rng) for i in range(count)]
            past.put(answers, outcomes=outcomes)
            for job in range(first // EVALUATED, (first + count) // EVALUATED):
                past.finish(f"evaluate 0.{job + 1}", [_evaluation(job + 1)])
            follower.checkpoint()
    metrics, evaluations = MetricsWriter(run.path), EvaluationWriter(run.path)
    for step in range(1, rows // SHARE + 1):
        seconds += 0.02
        numbers = {f"metric_{i}": float(step) for i in range(30)}
        metrics.write(Version(0, step), seconds, {"generated_tokens": 90.0 * step, "tokens": 100.0, **numbers})
        if step * SHARE % EVALUATED == 0:
            evaluations.write([_evaluation(step)])
    metrics.close()
    evaluations.close()
    return own, run


def _answer(prompt: Any, number: int, rng: np.random.Generator) -> Trajectory:
    tokens = rng.integers(1, 1 + task.symbols, task.length).astype(np.int32)
    logs = -rng.random(task.length).astype(np.float32)
    completion = Completion(tokens, "ABC", StopReason.LENGTH, (Version(), Version()), log_behavior=logs)
    reward = float(rng.random())
    uid = (number.to_bytes(8, "big") + rng.bytes(8)).hex()  # rising, as those of a searcher's rounds
    return Trajectory(uid, prompt, completion, reward, log_reference=logs, reference=Version())


def _evaluation(step: int) -> Evaluation:
    return Evaluation(Version(0, step), 0.02 * step, "pass@1/greedy", 0.5, 100, 1.0, 100)


@dataclass
class Halves:
    """A searcher and a trainer that take turns, and who looks at them."""

    search: SearcherLoop
    train: TrainerLoop
    progress: RunProgress
    joined: JoinedSearchers

    def round(self) -> None:
        self.search.evaluate()
        self.search.round()

    def step(self) -> None:
        self.train._counters_read_at = -1e9  # at the searchers' counts too, which is done once a second
        self.train.step()

    def look(self) -> None:
        self.progress.status("training")
        self.joined._checked_at = -1e9
        self.joined.release_leases_of_dead(self.train.run.journal(self.train.recipe))
        is_held(self.train.run.path)


@contextmanager
def halves(own: Recipe, run: RunDirectory) -> Iterator[Halves]:
    """Of the run, with all that it has taken in."""
    with ExitStack() as ends:
        search = start_searching(own, run, 0)
        ends.callback(search.close)
        train = start_training(own, run, stop=lambda: False, prefetch=False, turn_taker=search)
        ends.callback(train.close)
        train.replay.drain()
        yield Halves(search, train, RunProgress(own, run), JoinedSearchers(run))


def measured(both: Halves, counting: Counting, times: int) -> dict[str, dict[str, float]]:
    """The mean of each, after some turns that are not counted."""
    doings: dict[str, Callable[[], None]] = {"round": both.round, "step": both.step, "look": both.look}
    for _ in range(12):  # until nothing of before is recent
        for do in doings.values():
            do()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in doings}
    for _ in range(times):
        for name, do in doings.items():
            with counting.counted() as counts:
                do()
            found[name].append(counts)
    with counting.counted() as counts:
        both.train.checkpoint()
    found["checkpoint"] = [counts]
    return {name: {key: float(np.mean([c[key] for c in those])) for key in those[0]} for name, those in found.items()}


def size_of(rows: int, times: int, folder: Path) -> dict[str, Any]:
    """All that is said of one size."""
    with Counting() as counting:
        with halves(*made(folder / "first", 200)) as both:  # which loads all that has to be loaded once
            both.step()
        began = time.perf_counter()
        own, run = made(folder / "run", rows)
        filled = time.perf_counter() - began
        with counting.counted(every=1000) as start, ExitStack() as ends:
            both = ends.enter_context(halves(own, run))
            started = ends.pop_all()
        with started:
            found = measured(both, counting, times)
            with counting.counted() as attach:
                joining = start_searching(own, run, 1000)
                joining.round()
                joining.close()
            with counting.counted() as first_look:
                RunProgress(own, run).status("training")
            with counting.counted() as shown:
                show(RunRecord.read(run.path))
    once = {"start": start, "search": attach, "first look": first_look, "tba show": shown}
    return {"rows": rows, "filled": filled, "each": found, "once": once}


def print_sizes(found: Sequence[dict[str, Any]]) -> None:
    print(f"{'':12}{'rows':>10}{'statements':>12}{'instructions':>13}{'lines':>12}{'bytes':>14}{'ms':>11}")
    for part in ("each", "once"):
        for name in found[0][part]:
            for size in found:
                c = size[part][name]
                print(
                    f"{name:12}{size['rows']:>10,}{c['statements']:>12,.1f}{c['instructions']:>13,.1f}{c['lines']:>12,.1f}"
                    f"{c['bytes']:>14,.0f}{c['milliseconds']:>11,.2f}"
                )


def many_steps(steps: int, folder: Path) -> None:
    """Memory, descriptors and disk over so many steps and rounds, the second half apart."""
    buffer = replace(recipe.replay, buffer=replace(recipe.replay.buffer, total=2000))
    own, run = made(folder / "run", 2000, replay=buffer)
    with halves(own, run) as both:
        marks = []
        for step in range(steps + 1):
            if step * MARKS % steps < MARKS:  # from 0 to the last one
                marks.append((step, resident(), len(os.listdir("/proc/self/fd")), disk(run.path)))
            both.round()
            both.step()
            both.look()
            if step % 100 == 99:
                both.train.checkpoint()
    print(f"{'step':>8}{'resident MB':>14}{'descriptors':>13}")
    for step, memory, descriptors, _ in marks:
        print(f"{step:>8,}{memory / 1e6:>14.1f}{descriptors:>13}")
    (then, _, _, middle), (now, _, _, last) = marks[len(marks) // 2], marks[-1]
    print(f"bytes per step and round of 64 answers ({task.length} tokens), over the second half:")
    for name in sorted(last, key=lambda name: middle.get(name, 0) - last[name]):
        print(f"  {name:24}{(last[name] - middle.get(name, 0)) / (now - then):>10,.0f}")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def disk(run: Path) -> dict[str, int]:
    """Bytes by file or folder."""
    found: dict[str, int] = {}
    for path in run.rglob("*"):
        if path.is_file():
            name = path.relative_to(run).parts[0]
            name = "journal.sqlite" if name.startswith("journal.sqlite") else name
            found[name] = found.get(name, 0) + path.stat().st_size
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000,100000,1000000", help="fewer sizes, or none ('')")
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the run whose memory is measured; 0: none")
    parser.add_argument("--folder", type=Path, default=None, help="where the runs are made; they are removed")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one is not None:
        print(json.dumps(size_of(options.one, options.times, options.folder)))
        return
    found = []
    for rows in map(int, filter(None, options.rows.split(","))):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            again = [sys.executable, __file__, "--one", str(rows), "--times", str(options.times), "--folder", folder]
            ended = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(ended.stdout.splitlines()[-1]))
            print(f"{rows:,} rows: made in {found[-1]['filled']:.0f} s", flush=True)
    if found:
        print_sizes(found)
    if options.steps:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            many_steps(options.steps, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
