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
from tba.runtime.prompt_sets import prompts_of
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
        buffer=BufferSettings(per_prompt=10_000, deduplicate=False),
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
recipe = replace(recipe, run=replace(recipe.run, checkpoint_every=0, synchronous_rounds=True))
ROWS_PER_STEP = 10  # trajectories to a line of metrics.jsonl, and to an outcome of a prompt
ROWS_PER_EVALUATION = 1000  # and to a finished evaluation
MEMORY_MARKS = 8  # times in a run of --steps that its memory and descriptors are looked at
ROWS_PER_PUT = 2000  # trajectories put in one transaction


class SqliteCounter:
    """Counts the statements of all connections to SQLite and their instructions, while it is entered."""

    def __init__(self) -> None:
        self.statements = self.instructions = self.lines = 0
        self.is_counting, self._instructions_per_count = False, 1
        self._connections: list[sqlite3.Connection] = []
        self._connect, self._loads = sqlite3.connect, json.loads

    def __enter__(self) -> SqliteCounter:
        connect: Any = self._connect_counted  # sqlite3's own has overloads
        sqlite3.connect, json.loads = connect, self._loads_counted
        return self

    def __exit__(self, *_: object) -> None:
        sqlite3.connect, json.loads = self._connect, self._loads

    @contextmanager
    def count(self, instructions_per_count: int = 1) -> Iterator[dict[str, float]]:
        """Yields counts that the end of the block fills in. Instructions are counted by so many at a time."""
        self._instructions_per_count = instructions_per_count
        for connection in self._connections:
            self._watch(connection)
        counts: dict[str, float] = {}
        self.is_counting = True
        counts_before, bytes_before, start = self._counts(), bytes_read(), time.perf_counter()
        try:
            yield counts
        finally:
            seconds, read_bytes = time.perf_counter() - start, bytes_read() - bytes_before
            self.is_counting = False
            for connection in self._connections:
                self._unwatch(connection)
            counts |= {name: count - counts_before[name] for name, count in self._counts().items()}
            counts |= {"bytes": read_bytes, "milliseconds": 1e3 * seconds}

    def _counts(self) -> dict[str, float]:
        return {"statements": self.statements, "instructions": self.instructions, "lines": self.lines}

    def _connect_counted(self, *arguments: Any, **keywords: Any) -> sqlite3.Connection:
        connection = self._connect(*arguments, **keywords)
        self._connections.append(connection)
        if self.is_counting:
            self._watch(connection)
        return connection

    def _watch(self, connection: sqlite3.Connection) -> None:
        try:
            connection.set_trace_callback(self._count_statement)
            connection.set_progress_handler(self._count_instructions, self._instructions_per_count)
        except sqlite3.ProgrammingError:  # closed meanwhile
            self._forget(connection)

    def _unwatch(self, connection: sqlite3.Connection) -> None:
        try:
            connection.set_trace_callback(None)
            connection.set_progress_handler(None, 1)
        except sqlite3.ProgrammingError:
            self._forget(connection)

    def _forget(self, connection: sqlite3.Connection) -> None:
        self._connections = [c for c in self._connections if c is not connection]

    def _count_statement(self, statement: str) -> None:
        self.statements += 1

    def _count_instructions(self) -> int:
        self.instructions += self._instructions_per_count
        return 0

    def _loads_counted(self, *arguments: Any, **keywords: Any) -> Any:
        self.lines += self.is_counting
        return self._loads(*arguments, **keywords)


def bytes_read() -> int:
    """Returns the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def write_run(path: Path, rows: int, **changes: Any) -> tuple[Recipe, RunDirectory]:
    """Writes a run with so many trajectories, by the parts that write them; returns its recipe and the run."""
    run_recipe = replace(recipe, **changes)
    run = RunDirectory.create(path, str(Path(__file__).resolve()), [], run_recipe)
    prompts = prompts_of(run_recipe, run_recipe.model, "train")
    rng, seconds = np.random.default_rng(0), 0.0
    journal = run.journal(run_recipe)
    with JournalFollower(journal, position=2**62) as follower, JournalWriter(journal, "past") as writer:
        for start in range(0, rows, ROWS_PER_PUT):
            count = min(ROWS_PER_PUT, rows - start)
            outcomes = [(int(p), 1.0, 31.0) for p in rng.integers(len(prompts), size=count // ROWS_PER_STEP)]
            answers = [_answer(prompts[i % len(prompts)], start + i, rng) for i in range(count)]
            writer.put(answers, outcomes=outcomes)
            for job in range(start // ROWS_PER_EVALUATION, (start + count) // ROWS_PER_EVALUATION):
                writer.finish(f"evaluate 0.{job + 1}", [_evaluation(job + 1)])
            follower.checkpoint()
    metrics, evaluations = MetricsWriter(run.path), EvaluationWriter(run.path)
    for step in range(1, rows // ROWS_PER_STEP + 1):
        seconds += 0.02
        numbers = {f"metric_{i}": float(step) for i in range(30)}
        metrics.write(Version(0, step), seconds, {"generated_tokens": 90.0 * step, "tokens": 100.0, **numbers})
        if step * ROWS_PER_STEP % ROWS_PER_EVALUATION == 0:
            evaluations.write([_evaluation(step)])
    metrics.close()
    evaluations.close()
    return run_recipe, run


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
    """Holds a searcher and a trainer that take turns, and what a live view and a driver read of them."""

    searcher: SearcherLoop
    trainer: TrainerLoop
    progress: RunProgress
    joined: JoinedSearchers

    def round(self) -> None:
        self.searcher.evaluate()
        self.searcher.round()

    def step(self) -> None:
        self.trainer._counters_read_at = -1e9  # at the searchers' counts too, which is done once a second
        self.trainer.step()

    def observe(self) -> None:
        self.progress.status("training")
        self.joined._checked_at = -1e9
        self.joined.release_leases_of_dead(self.trainer.run.journal(self.trainer.recipe))
        is_held(self.trainer.run.path)


@contextmanager
def open_halves(run_recipe: Recipe, run: RunDirectory) -> Iterator[Halves]:
    """Opens both halves of a run, with all that its replay has read."""
    with ExitStack() as exit_stack:
        searcher = start_searching(run_recipe, run, 0)
        exit_stack.callback(searcher.close)
        trainer = start_training(run_recipe, run, stop=lambda: False, prefetch=False, turn_taker=searcher)
        exit_stack.callback(trainer.close)
        trainer.replay.drain()
        yield Halves(searcher, trainer, RunProgress(run_recipe, run), JoinedSearchers(run))


def measure_halves(halves: Halves, counting: SqliteCounter, times: int) -> dict[str, dict[str, float]]:
    """Returns the mean counts of each action, after some turns that are not counted."""
    actions: dict[str, Callable[[], None]] = {"round": halves.round, "step": halves.step, "look": halves.observe}
    for _ in range(12):  # until nothing of before is recent
        for action in actions.values():
            action()
    counts_by_action: dict[str, list[dict[str, float]]] = {name: [] for name in actions}
    for _ in range(times):
        for name, action in actions.items():
            with counting.count() as counts:
                action()
            counts_by_action[name].append(counts)
    with counting.count() as counts:
        halves.trainer.checkpoint()
    counts_by_action["checkpoint"] = [counts]
    return {
        name: {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        for name, rows in counts_by_action.items()
    }


def measure_size(rows: int, times: int, folder: Path) -> dict[str, Any]:
    """Returns all counts for one number of rows."""
    with SqliteCounter() as counting:
        with open_halves(*write_run(folder / "first", 200)) as toy_halves:  # which loads all that has to be loaded once
            toy_halves.step()
        start_time = time.perf_counter()
        run_recipe, run = write_run(folder / "run", rows)
        fill_seconds = time.perf_counter() - start_time
        with counting.count(instructions_per_count=1000) as start_counts, ExitStack() as exit_stack:
            toy_halves = exit_stack.enter_context(open_halves(run_recipe, run))
            running = exit_stack.pop_all()
        with running:
            figures = measure_halves(toy_halves, counting, times)
            with counting.count() as attach_counts:
                joining_searcher = start_searching(run_recipe, run, 1000)
                joining_searcher.round()
                joining_searcher.close()
            with counting.count() as first_look_counts:
                RunProgress(run_recipe, run).status("training")
            with counting.count() as show_counts:
                show(RunRecord.read(run.path))
    once_figures = {"start": start_counts, "search": attach_counts}
    once_figures |= {"first look": first_look_counts, "tba show": show_counts}
    return {"rows": rows, "filled": fill_seconds, "each": figures, "once": once_figures}


def print_sizes(sizes: Sequence[dict[str, Any]]) -> None:
    print(f"{'':12}{'rows':>10}{'statements':>12}{'instructions':>13}{'lines':>12}{'bytes':>14}{'ms':>11}")
    for part in ("each", "once"):
        for name in sizes[0][part]:
            for size in sizes:
                counts = size[part][name]
                print(
                    f"{name:12}{size['rows']:>10,}{counts['statements']:>12,.1f}{counts['instructions']:>13,.1f}{counts['lines']:>12,.1f}"
                    f"{counts['bytes']:>14,.0f}{counts['milliseconds']:>11,.2f}"
                )


def print_memory(steps: int, folder: Path) -> None:
    """Prints memory, descriptors and disk over so many steps and rounds, the second half apart."""
    replay = replace(recipe.replay, buffer=replace(recipe.replay.buffer, total=2000))
    run_recipe, run = write_run(folder / "run", 2000, replay=replay)
    with open_halves(run_recipe, run) as toy_halves:
        marks = []
        for step in range(steps + 1):
            if step * MEMORY_MARKS % steps < MEMORY_MARKS:  # from 0 to the last one
                marks.append((step, resident_bytes(), len(os.listdir("/proc/self/fd")), bytes_by_file(run.path)))
            toy_halves.round()
            toy_halves.step()
            toy_halves.observe()
            if step % 100 == 99:
                toy_halves.trainer.checkpoint()
    print(f"{'step':>8}{'resident MB':>14}{'descriptors':>13}")
    for step, memory, descriptors, _ in marks:
        print(f"{step:>8,}{memory / 1e6:>14.1f}{descriptors:>13}")
    (middle_step, _, _, middle_bytes), (last_step, _, _, last_bytes) = marks[len(marks) // 2], marks[-1]
    print(f"bytes per step and round of 64 answers ({task.length} tokens), over the second half:")
    for name in sorted(last_bytes, key=lambda name: middle_bytes.get(name, 0) - last_bytes[name]):
        print(f"  {name:24}{(last_bytes[name] - middle_bytes.get(name, 0)) / (last_step - middle_step):>10,.0f}")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_by_file(run: Path) -> dict[str, int]:
    """Returns the bytes of a run by file or folder."""
    sizes: dict[str, int] = {}
    for path in run.rglob("*"):
        if path.is_file():
            name = path.relative_to(run).parts[0]
            name = "journal.sqlite" if name.startswith("journal.sqlite") else name
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    return sizes


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
        print(json.dumps(measure_size(options.one, options.times, options.folder)))
        return
    sizes = []
    for rows in map(int, filter(None, options.rows.split(","))):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            command = [sys.executable, __file__, "--one", str(rows), "--times", str(options.times), "--folder", folder]
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            sizes.append(json.loads(process.stdout.splitlines()[-1]))
            print(f"{rows:,} rows: made in {sizes[-1]['filled']:.0f} s", flush=True)
    if sizes:
        print_sizes(sizes)
    if options.steps:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print_memory(options.steps, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
