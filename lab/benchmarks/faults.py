"""Injects faults into runs at random moments: what was lost, what was reported, and whether the runs completed.

    python lab/benchmarks/faults.py [--runs 4] [--kinds searcher,bits] [--steps 120] [--out faults.csv] [--keep FOLDER]

Each run is a shortened quickstart with one fault, at a step drawn from all of its steps (every fourth time within its
first seconds); then it has to complete, by itself or by `tba resume`. `--out` gets a row as soon as a run has
ended; runs that it has already are not repeated. The kinds:

    none                                 undisturbed
    searcher, trainer, driver            killed
    searcher-stopped, trainer-stopped    stopped for some seconds (SIGSTOP), and continued
    searcher-hangs, trainer-hangs        stopped for good after a sign of life: until the silence deadline
    evaluation                           searcher, trainer or driver killed while a version is evaluated
    resume                               driver killed, and killed twice more while the run is resumed
    bits                                 a few bits of the journal flipped while nothing runs
    truncated                            the journal cut off at a random place while nothing runs
    emptied                              the journal deleted or emptied while nothing runs
    log-gone                             the log of a run that was killed deleted or cut while nothing runs
    log-stale, log-foreign               an earlier log of its own, or another journal's, beside a journal that was
                                         closed in order; it is read by `tba replay` first
    bodies-swapped, body-foreign         two trajectories with each other's content; one with another's
    rows-removed                         the last row deleted by SQL, or some content in the middle
    disk-before, disk-after              the disk full before the first checkpoint, after one; then room is made
    clock                                time.time set back by an hour, the driver killed, set back by a day
    two-resumes                          driver killed, two resumes at once
    version                              a searcher with other source files tries to join
    copied-back                          an older copy of the journal laid over it while nothing runs
    copied-under                         an older copy written over the journal in place, under the run, every second
                                         time with an empty log
    searcher-memory, trainer-memory      no more memory for it than it has, or some megabytes more (ulimit -v)
    output-closed, output-full           nowhere to go for what the run prints, from its start
    eio-metrics, eio-checkpoint, eio-weights, eio-journal, eio-evaluations, eio-log, eio-ledger, eio-summary
                                         EIO for each write to such a file and each flush of it, from some moment on;
                                         the disk is well again for the resume (needs a C compiler)
    reward-exits, reward-forks, reward-hangs, reward-memory, reward-closes
                                         the reward ends its process, forks it, never returns, asks for 10 GB, or closes
                                         the process's outputs, once
    refill, teacher                      driver killed: with `--replay.selection.refill`; while a student learns from a
                                         teacher, which is not there, or another one, at the first resume
    memory-copy                          a copy of a run with `--publish.in-memory` is resumed while the run goes on
    memory-emptied                       all that a run with `--publish.in-memory` has in /dev/shm deleted: it goes on;
                                         every second time while nothing runs: it is resumed
    searcher-files                       files of the searcher may not grow any more (ulimit -f)
    moved                                the folder of the run moved away under it, and put back once the run has ended
    gateway-no-token, gateway-wrong-token, gateway-replay, gateway-body
                                         to the servers of a cluster run (--runtime cluster): requests and a searcher
                                         that would join without the cluster's token, or with another; rows that were
                                         acknowledged, once more; a body of 1 GB that is announced and sent in part
    served-server, served-trainer, served-driver, served-agent
                                         killed, of a run that learns from agents of `tba serve` alone; what agents were
                                         told is on the disk has to be there

Every run is required to meet these conditions:

  - it ends with all its steps (`finished`), and nothing waits for longer than the deadline (`hangs`); what ends before
    says so in a sentence, never in a traceback;
  - each trajectory that was acknowledged before is in the journal at the end, unchanged, or the run itself has reported
    how many are not: `inflicted` counts those that the fault has cost, `reported` those that the run reports, `lost`
    those that it does not report. Where a file is written over under the run, what is acknowledged until that is
    noticed counts as inflicted too;
  - nothing is trained twice: uses, the steps that led to the last weights and the account agree (`twice`);
  - the account of tokens and trajectories closes;
  - its kind's own promise: an error sentence, a counted fault, an evaluation that was completed.

The sampled accuracy is reported too, as information only.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import resource
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from gateway_requests import METHODS, Announced, listeners, status_of
from parts import forked, parts_of

import tba
from tba.command.replay import uses_of
from tba.recipes.quickstart import BASE
from tba.record.faults import count_faults, read_faults
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.replay.journal import JournalWriter
from tba.replay.pages import committed_frames, wal_frames
from tba.runtime.local.heartbeat import heartbeat_file
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import is_held

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from serving.chat_llama import chat_llama
from serving.http_agents import acknowledged

SAMPLED = "pass@1/sampled"
PROBLEMS = 500
STEPS_PER_CHECKPOINT = 24  # steps from one checkpoint to the next: whole weight syncs
COMMON_ARGUMENTS = [
    *("--evaluation.every", "0", "--evaluation.problems", str(PROBLEMS), "--evaluation.pass-k", "0"),
    *("--evaluation.no-greedy", "--run.checkpoint-every", str(STEPS_PER_CHECKPOINT), "--record.no-tensorboard"),
    *("--record.samples-per-batch", "0", "--replay.pacing.warm-up", "700"),
]
JUDGE_ARGUMENTS = [
    *("--task.judge.seconds", "0.1", "--task.judge.spread", "1.0", "--task.judge.concurrency", "64"),
    *("--task.judge.raises", "0.01", "--task.judge.hangs", "0.001", "--run.reward-deadline", "5"),
]
SILENCE_SECONDS = 20  # seconds until a part that hangs is killed
DISK_MEGABYTES = 96  # megabytes
ANNOUNCED_BYTES, SENT_BYTES = 10**9, 64_000_000  # bytes of a body
GATEWAY_FAULTS = ("searcher_restarts", "trainer_restarts", "exchange_restarts", "searchers_waiting", "silences")
ATTACK_FACTOR = 20  # times the steps, of a run that is attacked
MEMORY_SLACK = 32_000_000  # bytes that a server's memory may grow by besides
TESTS = Path(__file__).resolve().parents[2] / "tests"
SERVED_STEPS, AGENTS = 30, 3  # of a run that learns from agents
DEADLINE = 600.0  # seconds for anything
POLL = 0.02

Rows = dict[int, list[Any]]  # what the journal holds of each trajectory, by its place


class DeadlineMissed(Exception):
    """Something took longer than the deadline."""


class TooLate(Exception):
    """The run was over before anything could be done to it."""


@dataclass(frozen=True)
class Outcome:
    """Holds what one disturbed run lost, reported and cost."""

    kind: str
    number: int
    step: int  # recorded when it was disturbed
    finished: bool
    acknowledged: int  # trajectories, just before
    lost: int
    inflicted: int
    reported: int
    twice: int
    closes: bool
    hangs: int
    accuracy: float
    seconds: float
    wrong: str  # what else is not as promised
    faults: str

    @property
    def bad(self) -> bool:
        is_complete = self.finished and self.closes and self.inflicted == self.reported
        return not is_complete or bool(self.lost or self.twice or self.hangs or self.wrong)


@dataclass
class Run:
    """A run that is under way, with the processes that belong to it."""

    kind: str
    number: int
    steps: int
    path: Path
    folder: Path  # for what is kept of it, on another disk
    rng: random.Random
    environment: dict[str, str] = field(default_factory=dict)
    output: str = ""  # where a shell sends what it prints
    processes: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)  # with what each said
    acknowledged: Rows = field(default_factory=dict)
    step: int = 0
    is_damaged: bool = False  # the journal is damaged
    goes_on: bool = False  # under the run, which acknowledges more until it notices
    violations: list[str] = field(default_factory=list)

    def begin(self, *overrides: str, recipe: str = "quickstart") -> None:
        name = ("--runs", str(self.path.parent), "--run-name", self.path.name, "--seed", str(self.number))
        self.start("train", recipe, *name, "--steps", str(self.steps), *COMMON_ARGUMENTS, *overrides)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        text_file = self.folder / f"said-{len(self.processes)}.txt"
        environment = {**os.environ, **self.environment, **variables, "COLUMNS": "1000"}
        with text_file.open("wb") as file:
            command = [sys.executable, "-m", "tba", *arguments]
            if self.output:
                command = ["/bin/sh", "-c", f'exec "$@" {self.output}', "sh", *command]
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.processes.append((process, text_file))
        return process

    def resume(self, *overrides: str) -> subprocess.Popen[bytes]:
        return self.start("resume", str(self.path), *overrides)

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        return self.processes[-1][0]

    def text(self, n: int = -1) -> str:
        return " ".join(self.processes[n][1].read_text(errors="replace").split())

    def exit_code(self, n: int = -1) -> int:
        """Waits for a process; returns its exit code."""
        try:
            return self.processes[n][0].wait(DEADLINE)
        except subprocess.TimeoutExpired as error:
            raise DeadlineMissed(f"{self.processes[n][0].args!r} goes on: {self.text(n)[-300:]}") from error

    def until(self, condition: Callable[[], Any], while_running: bool = True) -> Any:
        limit = time.monotonic() + DEADLINE
        while not (value := condition()):
            if while_running and self.driver.poll() is not None:
                raise TooLate(self.text()[-300:])
            if time.monotonic() > limit:
                raise DeadlineMissed("a moment that did not come")
            time.sleep(POLL)
        return value

    def wait_for_step(self, least: int = 0, most: int | None = None) -> None:
        """Wait for a random step; now and then only for some of the first seconds, where the range begins at 0."""
        if least == 0 and self.number % 4 == 3:
            time.sleep(self.rng.uniform(0.5, 8.0))
            self.until((self.path / "recipe.json").exists)
        else:
            step = self.rng.randint(least, self.steps - 15 if most is None else most)
            self.until(lambda: len(read_metrics(self.path)) >= step)
        self.step = len(read_metrics(self.path))

    def kill(self, part: str) -> None:
        victim = self.process_of(part)
        self.acknowledged = rows_of(self.path / "journal.sqlite")
        os.kill(victim, signal.SIGKILL)

    def process_of(self, part: str) -> int:
        """Returns the process id of a part."""
        if part == "driver":
            return self.driver.pid
        pid: int = self.until(lambda: parts_of(self.driver.pid).get(part))
        return pid

    def kill_driver_and_wait(self) -> None:
        """Kill the driver, and wait until nobody works on the run any longer."""
        self.kill("driver")
        self.exit_code()
        self.until(lambda: not is_held(self.path), while_running=False)
        self.acknowledged = self.copied_rows()

    def copied_rows(self) -> Rows:
        """Returns the journal's rows, read from a copy, since reading opens it."""
        for part in ("", "-wal"):
            file = Path(f"{self.path / 'journal.sqlite'}{part}")
            if file.exists():
                shutil.copy(file, self.folder / f"copy.sqlite{part}")
        return rows_of(self.folder / "copy.sqlite")

    def require(self, condition: object, violation: str) -> None:
        if not condition:
            self.violations.append(violation)


def kill_part(part: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.begin()
        run.wait_for_step()
        run.kill(part)

    return disturb


def kill_part_while_grading(part: str) -> Callable[[Run], None]:
    """Kills a part while a judge of 0.1 s, log-normal, grades, whose calls raise and hang now and then."""

    def disturb(run: Run) -> None:
        run.begin(*JUDGE_ARGUMENTS, recipe=str(Path(__file__).with_name("slow_judge.py")))
        run.wait_for_step()
        run.kill(part)

    return disturb


def pause_part(part: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.begin()
        run.wait_for_step()
        victim = run.process_of(part)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        os.kill(victim, signal.SIGSTOP)
        time.sleep(run.rng.uniform(1.0, 8.0))
        os.kill(victim, signal.SIGCONT)
        run.exit_code()
        faults = count_faults(run.path)
        run.require(not faults["searcher_restarts"] + faults["trainer_restarts"], "what was continued was restarted")

    return disturb


def hang_part(part: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.begin("--run.silence-deadline", str(SILENCE_SECONDS))
        run.wait_for_step()
        run.until(heartbeat_file(run.path, part).exists)  # before, it may load a model for an hour
        victim = run.process_of(part)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        os.kill(victim, signal.SIGSTOP)
        run.exit_code()
        run.require(count_faults(run.path)["silences"], "its silence was not counted")

    return disturb


def kill_during_evaluation(run: Run) -> None:
    run.begin("--evaluation.every", str(STEPS_PER_CHECKPOINT), "--evaluation.problems-during", str(PROBLEMS))
    run.wait_for_step(least=1)
    journal = run.path / "journal.sqlite"
    run.until(lambda: query_rows(journal, "SELECT 1 FROM jobs WHERE NOT done AND seconds > 0"))
    time.sleep(run.rng.uniform(0.0, 0.2))
    run.kill(("searcher-0", "trainer", "driver")[run.number % 3])


def _has_other_facts(path: Path, facts: Mapping[str, Any]) -> bool:
    return RunDirectory.open(path).facts != facts


def kill_resumes(run: Run) -> None:
    run.begin()
    run.wait_for_step()
    run.kill_driver_and_wait()
    for attempt in range(2):
        facts, process = RunDirectory.open(run.path).facts, run.resume()
        if attempt:  # once it has begun its incarnation
            run.until(partial(_has_other_facts, run.path, facts))
        time.sleep(run.rng.uniform(0.0, 5.0))
        process.kill()
        run.exit_code()


def flip_bits(run: Run) -> None:
    run.begin()
    run.wait_for_step(least=1)
    run.kill_driver_and_wait()
    run.is_damaged = True
    files = [f for f in (run.path / "journal.sqlite", run.path / "journal.sqlite-wal") if f.exists()]
    for _ in range(run.rng.randint(1, 8)):
        offset = run.rng.randrange(sum(f.stat().st_size for f in files))
        for file in files:
            if offset < file.stat().st_size:
                flip_bit(file, offset, 1 << run.rng.randrange(8))
                break
            offset -= file.stat().st_size


def flip_bit(file: Path, offset: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ bit]))


def truncate_journal(run: Run) -> None:
    run.begin()
    run.wait_for_step(least=1)
    run.kill_driver_and_wait()
    run.is_damaged = True
    file = run.path / "journal.sqlite"
    os.truncate(file, run.rng.randrange(1, file.stat().st_size))


def empty_journal(run: Run) -> None:
    run.begin()
    run.wait_for_step(least=STEPS_PER_CHECKPOINT + 5)
    run.kill_driver_and_wait()
    run.is_damaged = True
    file = run.path / "journal.sqlite"
    Path(f"{file}-wal").unlink(missing_ok=True)
    if run.number % 2:
        os.truncate(file, 0)
    else:
        file.unlink()


def remove_log(run: Run) -> None:
    """Kills all parts at once, so that nobody moves the log into the journal, and removes or cuts the log."""
    run.begin()
    run.wait_for_step(least=1)
    parts = (*parts_of(run.driver.pid).values(), *forked(run.driver.pid), run.driver.pid)
    for kind in (signal.SIGSTOP, signal.SIGKILL):
        for part in parts:
            os.kill(part, kind)
    run.exit_code()
    run.until(lambda: not is_held(run.path), while_running=False)
    run.acknowledged = run.copied_rows()
    run.is_damaged = True
    log = Path(f"{run.path / 'journal.sqlite'}-wal")
    if run.number % 2 and log.exists():
        os.truncate(log, run.rng.randrange(log.stat().st_size + 1))
    else:
        log.unlink(missing_ok=True)


def put_strange_log(earlier: bool) -> Callable[[Run], None]:
    """Puts a strange log beside the journal: the run's own from earlier, or another journal's."""

    def disturb(run: Run) -> None:
        journal, strange_file = run.path / "journal.sqlite", run.folder / "stale"
        run.begin()
        run.wait_for_step(least=1, most=run.steps // 2)
        if earlier:
            run.until(lambda: committed_frames(wal_frames(Path(f"{journal}-wal"))))
            shutil.copy(f"{journal}-wal", strange_file)
        else:
            other_journal = run.folder / "other.sqlite"
            with closing(sqlite3.connect(journal)) as connection:
                connection.execute("VACUUM INTO ?", (str(other_journal),))
            with JournalWriter(other_journal, "searcher-0") as writer:
                writer.count(rejected_trajectories=1)
                shutil.copy(f"{other_journal}-wal", strange_file)
        run.wait_for_step(least=len(read_metrics(run.path)) + 5)
        run.driver.send_signal(signal.SIGINT)
        run.require(run.exit_code() == 130, f"it did not stop in order: {run.text()[-300:]}")
        run.acknowledged = run.copied_rows()
        shutil.copy(strange_file, f"{journal}-wal")
        journal_bytes = journal.read_bytes()
        run.start("replay", str(run.path))
        run.require(run.exit_code() == 0 and "is passed over" in run.text(), f"replay: {run.text()[-300:]}")
        run.require(journal.read_bytes() == journal_bytes, "reading changed the journal")
        run.processes.append(run.processes[-2])

    return disturb


def damage_by_sql(*statements: tuple[str, ...]) -> Callable[[Run], None]:
    """Executes one of several lists of statements on a journal that nobody uses."""

    def disturb(run: Run) -> None:
        run.begin()
        run.wait_for_step(least=1)
        run.kill_driver_and_wait()
        run.is_damaged = True
        (last_row,) = query_rows(run.path / "journal.sqlite", "SELECT max(seq) FROM trajectories")
        places = {"last": last_row[0], "one": run.rng.randrange(1, last_row[0] - 100)}
        with closing(sqlite3.connect(run.path / "journal.sqlite")) as connection, connection:
            for statement in statements[run.number % len(statements)]:
                connection.execute(statement, places)

    return disturb


SWAP_BODIES = (
    "CREATE TEMP TABLE two AS SELECT seq, body FROM bodies WHERE seq IN (:one, :one + 50)",
    "UPDATE bodies SET body = (SELECT body FROM two WHERE two.seq = 2 * :one + 50 - bodies.seq) "
    "WHERE seq IN (:one, :one + 50)",
)
COPY_BODY = ("UPDATE bodies SET body = (SELECT body FROM bodies WHERE seq = :one + 50) WHERE seq = :one",)
DELETE_LAST_ROW = ("DELETE FROM trajectories WHERE seq = :last", "DELETE FROM bodies WHERE seq = :last")
DELETE_MIDDLE_ROWS = ("DELETE FROM bodies WHERE seq BETWEEN :one AND :one + 77",)


def put_back_backup(run: Run) -> None:
    backup = back_up_journal(run)
    run.kill_driver_and_wait()
    run.is_damaged = True
    file = run.path / "journal.sqlite"
    for part in ("-wal", "-shm"):
        Path(f"{file}{part}").unlink(missing_ok=True)
    shutil.copy(backup, file)


def put_backup_under_run(run: Run) -> None:
    backup = back_up_journal(run)
    parts = parts_of(run.driver.pid).values()
    for part in parts:
        os.kill(part, signal.SIGSTOP)
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    run.is_damaged = run.goes_on = True
    shutil.copyfile(backup, run.path / "journal.sqlite")  # in place
    if run.number % 2:
        os.truncate(run.path / "journal.sqlite-wal", 0)
    for part in parts:
        os.kill(part, signal.SIGCONT)
    if run.number % 2:
        require_sentence(run)
    else:  # it writes its log, which may have all that is newer, over the file in its turn
        run.exit_code()


def back_up_journal(run: Run) -> Path:
    """Begins the run, and goes on to some later step; returns a copy of its journal."""
    run.begin()
    run.wait_for_step(least=1, most=run.steps // 2)
    backup, step_before = run.folder / "older.sqlite", run.step
    with closing(sqlite3.connect(run.path / "journal.sqlite", timeout=30.0)) as journal:
        journal.execute("VACUUM INTO ?", (str(backup),))
    run.wait_for_step(least=step_before + 5)
    return backup


def limit_memory(part: str) -> Callable[[Run], None]:
    """Limits a part's memory: the run may end, or the part, which is started again without the limit."""

    def disturb(run: Run) -> None:
        run.begin("--run.silence-deadline", str(3 * SILENCE_SECONDS))
        run.wait_for_step(least=1)
        victim = run.process_of(part)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        pages = int(Path(f"/proc/{victim}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + run.rng.choice((0, 1, 4, 16)) * 1_000_000
        with suppress(ProcessLookupError):
            resource.prlimit(victim, resource.RLIMIT_AS, (limit, limit))
        code = run.exit_code()
        run.require(not code or "could not get the memory it needs" in run.text(), f"{code}: {run.text()[-300:]}")

    return disturb


def close_output(redirection: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.output = redirection
        run.begin()
        run.wait_for_step(least=1)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        run.require(run.exit_code() == 0, f"it did not train to its end: {run.text()[-300:]}")

    return disturb


def fail_disk(files: str, at_the_end: bool = False) -> Callable[[Run], None]:
    """Fails writes of some files from some moment on. at_the_end: the files are written at the run's end only."""

    def disturb(run: Run) -> None:
        library, trigger = run.folder / "eio.so", run.folder / "now"
        source = Path(__file__).with_name("eio.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        run.environment |= {"LD_PRELOAD": str(library), "EIO_FILES": files, "EIO_WHEN": str(trigger)}
        evaluation = ("--evaluation.every", str(STEPS_PER_CHECKPOINT), "--evaluation.problems-during", "20")
        run.begin(*evaluation, "--publish.no-in-memory")
        run.wait_for_step(least=1, most=run.steps - 15 if at_the_end else run.steps // 2)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        trigger.touch()
        if files == "searcher-0.log":  # a log that cannot be written costs nobody anything
            run.exit_code()
        else:
            require_sentence(run)
        trigger.unlink()
        run.until(lambda: not is_held(run.path), while_running=False)

    return disturb


def move_run(run: Run) -> None:
    run.begin()
    run.wait_for_step(least=1)
    moved_path = run.path.with_name("away")
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    run.path.rename(moved_path)
    require_sentence(run)
    run.require(not run.path.exists(), "another folder was made")
    moved_path.rename(run.path)
    run.until(lambda: not is_held(run.path), while_running=False)


def require_sentence(run: Run) -> None:
    code = run.exit_code()
    last_line = run.processes[-1][1].read_text(errors="replace").strip().splitlines()[-1:]
    run.require(code == 2 and last_line and last_line[0].startswith("tba: "), f"exit {code}: {run.text()[-300:]}")


def fill_disk(low: int, high: int | None) -> Callable[[Run], None]:
    """Fills a small mounted disk; without the right to mount, limits the size of files of all processes."""

    def disturb(run: Run) -> None:
        run.path.parent.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", str(run.path.parent)]
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
        run.begin()
        run.wait_for_step(low, high)
        ballast = run.path.parent / "ballast"
        if is_mounted:
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:  # ends: with no space left
                    file.write(bytes(1 << 16))
        else:
            limit = (run.path / "journal.sqlite").stat().st_size
            for process in (run.driver.pid, *forked(run.driver.pid), *parts_of(run.driver.pid).values()):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, limit))
        code = run.exit_code()
        run.require(code == 2 and "is full: free some space, then continue with" in run.text(), f"{code}: {run.text()}")
        run.until(lambda: not is_held(run.path), while_running=False)
        run.acknowledged = run.copied_rows()
        ballast.unlink(missing_ok=True)

    return disturb


def use_hostile_reward(act: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        trigger = run.folder / "now"
        run.environment |= {"HOSTILE_WHEN": str(trigger), "HOSTILE_ACT": act}
        recipe = str(Path(__file__).with_name("hostile_reward.py"))
        run.begin("--run.reward-deadline", "5", recipe=recipe)
        run.wait_for_step(least=1)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        trigger.touch()
        code, ends_process = run.exit_code(), act == "exit"  # what ends its process by itself is not started again
        run.require(code == (1 if ends_process else 0), f"exit {code}: {run.text()[-300:]}")
        run.require(not trigger.exists(), "the reward did nothing")
        if ends_process:
            run.require("ended with exit code 3" in run.text(), f"the exit code is not named: {run.text()[-300:]}")
        if act == "hang":
            summary = Summary.read(run.path)
            run.require(summary and summary.trajectories.rejected, "no answer was rejected")

    return disturb


def kill_driver_with_refill(run: Run) -> None:
    run.begin("--replay.selection.refill")
    run.wait_for_step()
    run.kill("driver")


def change_teacher(run: Run) -> None:
    """Removes or replaces the teacher's weights, which a resume names in a sentence."""
    folder, away = run.folder / "teacher", run.folder / "away"
    shutil.copytree(BASE, folder)
    run.begin("--teacher.paths", str(folder), recipe="distil")
    run.wait_for_step(least=1)
    run.kill_driver_and_wait()
    folder.rename(away)
    if run.number % 2:
        shutil.copytree(away, folder)
        weights = bytearray((folder / "model.safetensors").read_bytes())
        weights[len(weights) // 2 :] = bytes(len(weights) - len(weights) // 2)
        (folder / "model.safetensors").write_bytes(weights)
    run.resume()
    require_sentence(run)
    shutil.rmtree(folder, ignore_errors=True)
    away.rename(folder)


def resume_copy(run: Run) -> None:
    run.begin("--publish.in-memory")
    run.wait_for_step(least=5, most=run.steps // 2)
    copy = run.folder / "copy" / "run"
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    with suppress(shutil.Error):  # files that come and go
        shutil.copytree(run.path, copy, symlinks=True)
    run_process = run.processes[-1]
    run.start("resume", str(copy), "--accept-lost-rows")
    code = run.exit_code()
    run.require(code in (0, 2), f"the copy's resume ended with {code}: {run.text()[-300:]}")
    run.processes.append(run_process)
    run.require(run.exit_code() == 0, f"the run itself did not go on: {run.text()[-300:]}")


def empty_memory(run: Run) -> None:
    run.begin("--publish.in-memory")
    run.wait_for_step(least=1)
    is_killed = run.number % 2 == 1
    if is_killed:  # the trainer first: one that ends moves its versions to the disk
        os.kill(run.driver.pid, signal.SIGSTOP)  # nobody starts it again
        run.kill("trainer")
        run.kill_driver_and_wait()
    run.acknowledged = run.copied_rows()
    folders = memory_folders(run)
    run.require(bool(folders), "it had no weights in memory")
    for folder in folders:
        shutil.rmtree(folder)
    if is_killed:
        run.resume()
    run.require(run.exit_code() == 0, f"it did not go on: {run.text()[-300:]}")
    run.require(not count_faults(run.path)["searcher_restarts"], "a searcher was started again")
    run.require(not memory_folders(run), "something stayed in memory")


def memory_folders(run: Run) -> list[Path]:
    """Returns the folders in /dev/shm that hold weights of the run."""
    weights = run.path.resolve() / "weights"
    marks = Path("/dev/shm").glob("tba-published-*/of")
    return [mark.parent for mark in marks if mark.readlink() == weights]


def limit_searcher_files(run: Run) -> None:
    run.begin()
    run.wait_for_step(least=1)
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    limit = (run.path / "journal.sqlite").stat().st_size
    resource.prlimit(run.process_of("searcher-0"), resource.RLIMIT_FSIZE, (limit, limit))
    code = run.exit_code()
    run.require(code in (0, 2), f"exit {code}: {run.text()[-300:]}")


def attack_gateway(attack: Callable[[Run, dict[str, tuple[int, int]]], None]) -> Callable[[Run], None]:
    """Attacks a cluster's servers; the run goes on and records no fault."""

    def disturb(run: Run) -> None:
        run.steps *= ATTACK_FACTOR  # so that it lasts
        run.environment |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        run.begin("--runtime", "cluster", "--cluster.object-store-gb", "0.3")
        run.wait_for_step(least=1, most=run.steps // (2 * ATTACK_FACTOR))
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        servers, run_process = listeners(run.driver.pid), run.processes[-1]
        run.require(set(servers) == set(METHODS), f"only {sorted(servers)} were there")
        attack(run, servers)
        run.processes.append(run_process)
        run.require(run.driver.poll() is None, "the run was over before")
        run.require(run.exit_code() == 0, f"the run itself did not go on: {run.text()[-300:]}")
        faults = count_faults(run.path)
        noticed_faults = [name for name in GATEWAY_FAULTS if faults[name]]
        run.require(not noticed_faults, f"the run has met {noticed_faults}")

    return disturb


def use_strange_token(token: str) -> Callable[[Run, dict[str, tuple[int, int]]], None]:
    """Sends requests and a searcher with this token instead of the cluster's; empty: without a token."""

    def attack(run: Run, servers: dict[str, tuple[int, int]]) -> None:
        for name, (_, port) in servers.items():
            status = status_of(port, METHODS[name], {"authorization": f"Bearer {token}"} if token else {})
            run.require(status == "UNAUTHENTICATED", f"{name} answered {status}")
        address = f"127.0.0.1:{servers['gcs_server'][1]}"
        variables = {"RAY_AUTH_TOKEN": token, "HOME": str(run.folder), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        run.start("search", "--run", run.path.name, "--address", address, **variables)
        require_sentence(run)

    return attack


def replay_requests(run: Run, servers: dict[str, tuple[int, int]]) -> None:
    script, address = Path(__file__).with_name("gateway_requests.py"), f"127.0.0.1:{servers['gcs_server'][1]}"
    command, variables = [sys.executable, str(script), str(run.path), address], {**os.environ, **run.environment}
    process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE)
    run.require(process.returncode == 0, f"it was not replayed: {process.stderr[-300:]}")
    (duplicates,) = query_rows(run.path / "journal.sqlite", "SELECT count(*) - count(DISTINCT uid) FROM trajectories")
    run.require(duplicates == (0,), f"{duplicates[0]} rows are there twice")


def send_large_body(run: Run, servers: dict[str, tuple[int, int]]) -> None:
    for name, (process, port) in servers.items():
        memory_before = peak_memory(process)
        sent_bytes = Announced(port, METHODS[name], ANNOUNCED_BYTES).send(SENT_BYTES)
        growth = peak_memory(process) - memory_before
        run.require(growth <= sent_bytes + MEMORY_SLACK, f"{name} was sent {sent_bytes} bytes and grew by {growth}")


def peak_memory(process: int) -> int:
    """Returns the most bytes that a process had at any time."""
    (line,) = (line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def kill_served(part: str) -> Callable[[Run], None]:
    """Kills a part of a run that learns from agents alone, or one of them."""

    def disturb(run: Run) -> None:
        agents: list[subprocess.Popen[bytes]] = []
        begin_served(run)
        try:
            agents += [start_agent(run, i) for i in range(AGENTS)]
            serve_agents(run)
            run.wait_for_step(least=1, most=SERVED_STEPS // 2)
            if part == "driver":
                run.kill_driver_and_wait()
                run.resume()
                serve_agents(run)
            elif part == "server":
                run.acknowledged = rows_of(run.path / "journal.sqlite")
                run.processes[-2][0].kill()
                serve_agents(run)
            elif part == "agent":
                run.acknowledged = rows_of(run.path / "journal.sqlite")
                agents[0].kill()
                agents.append(start_agent(run, AGENTS))
            else:
                run.kill(part)
            run.require(run.exit_code() == 0, f"it did not train to its end: {run.text()[-300:]}")
            code, printed = run.exit_code(-2), run.text(-2)
            is_late = "is not in progress" in printed or "is ending" in printed  # what is left needed no new answers
            run.require(is_late or (code == 0 and "served: " in printed), f"the server, {code}: {printed[-300:]}")
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        acknowledged_uids = {uid for i in range(len(agents)) for uid in acknowledged(agent_record(run, i))}
        stored_uids = {uid for (uid,) in query_rows(run.path / "journal.sqlite", "SELECT uid FROM trajectories")}
        missing_uids = acknowledged_uids - stored_uids
        run.require(acknowledged_uids, "no agent was told of anything")
        run.require(
            not missing_uids, f"{len(missing_uids)} of {len(acknowledged_uids)} that agents were told of are not there"
        )

    return disturb


def begin_served(run: Run) -> None:
    run.steps, model = SERVED_STEPS, run.folder / "model"
    chat_llama(model)
    name = ("--runs", str(run.path.parent), "--run-name", run.path.name, "--seed", str(run.number))
    evaluation = ("--evaluation.problems", "4", "--evaluation.pass-k", "0", "--evaluation.no-greedy")
    recipe = str(TESTS / "serving" / "chat_recipe.py")
    run.start("train", recipe, *name, "--steps", str(run.steps), "--model.path", str(model), *evaluation)


def start_agent(run: Run, number: int) -> subprocess.Popen[bytes]:
    script = TESTS / "serving" / "http_agents.py"
    return subprocess.Popen([sys.executable, script, run.path, "agent", agent_record(run, number)])


def agent_record(run: Run, number: int) -> Path:
    """Returns the file of what an agent was told is on the disk."""
    return run.folder / f"agent-{number}.jsonl"


def serve_agents(run: Run) -> None:
    """Serve the run's agents, as soon as it can be joined, unless it ends before; its own process stays the last."""
    run_entry, facts = run.processes[-1], run.path / "serve.json"
    run.process_of("trainer")
    facts.unlink(missing_ok=True)  # of a server that was killed

    def serves() -> bool:
        server = run.start("serve", "--run", str(run.path), "--port", "0")
        run.until(lambda: facts.exists() or server.poll() is not None, while_running=False)
        return server.poll() is None or run_entry[0].poll() is not None

    run.until(serves, while_running=False)
    run.processes.append(run_entry)


CLOCK_SOURCE = """
import os, time
real = time.time
def set_back():
    with open(os.environ["CLOCK"]) as file:
        return real() - float(file.read() or 0)
time.time = set_back
"""


def set_clock_back(run: Run) -> None:
    """Sets the clock of every process of the run back by the seconds in a file."""
    (run.folder / "sitecustomize.py").write_text(CLOCK_SOURCE)
    offset_file = run.folder / "clock"
    offset_file.write_text("0")
    path = f"{run.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run.environment |= {"PYTHONPATH": path, "CLOCK": str(offset_file)}
    run.begin()
    run.wait_for_step(most=run.steps // 2)
    offset_file.write_text("3600")
    run.wait_for_step(least=run.steps // 2)
    run.kill("driver")
    run.exit_code()
    offset_file.write_text("86400")
    run.resume()
    run.exit_code()
    seconds = [row["wall_seconds"] for row in read_metrics(run.path)]
    run.require(0 <= min(seconds) <= max(seconds) < 2 * DEADLINE, f"wall-clock from {min(seconds)} to {max(seconds)} s")


def resume_twice(run: Run) -> None:
    run.begin()
    run.wait_for_step(least=STEPS_PER_CHECKPOINT + 5)
    run.kill_driver_and_wait()
    run.resume()
    run.resume()
    codes = [run.exit_code(n) for n in (-2, -1)]
    run.require(sorted(codes) == [0, 2], f"two resumes ended with {codes}")
    if 2 in codes:
        printed = run.text(codes.index(2) - 2)
        sentence = r"tba: the run at \S+ (is still in progress|has made \d+ steps, all)[^:]*: .*"
        run.require(re.fullmatch(sentence, printed), f"refused with: {printed[-300:]}")
    if 0 in codes:
        run.processes.append(run.processes[codes.index(0) - 2])


def join_with_other_version(run: Run) -> None:
    shutil.copytree(Path(tba.__file__).parent, run.folder / "tba", ignore=shutil.ignore_patterns("*.pyc"))
    with (run.folder / "tba" / "types.py").open("a") as file:
        file.write("# another version\n")
    run.begin()
    run.wait_for_step(least=1)
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    run_process = run.processes[-1]
    run.start("search", "--run", str(run.path), PYTHONPATH=str(run.folder))
    code, printed = run.exit_code(), run.text()
    sentence = r"tba: a searcher that would join uses tba (.+), but the run uses tba (.+): start it from the same .*"
    match = re.fullmatch(sentence, printed)
    run.require(code == 2 and match and match[1] != match[2], f"exit {code}: {printed[-300:]}")
    run.processes.append(run_process)


ACTS = {"exits": "exit", "forks": "fork", "hangs": "hang", "memory": "memory", "closes": "closed"}
KINDS: dict[str, Callable[[Run], None]] = {
    "none": Run.begin,
    "searcher": kill_part("searcher-0"),
    "trainer": kill_part("trainer"),
    "driver": kill_part("driver"),
    "searcher-grading": kill_part_while_grading("searcher-0"),
    "driver-grading": kill_part_while_grading("driver"),
    "searcher-stopped": pause_part("searcher-0"),
    "trainer-stopped": pause_part("trainer"),
    "searcher-hangs": hang_part("searcher-0"),
    "trainer-hangs": hang_part("trainer"),
    "evaluation": kill_during_evaluation,
    "resume": kill_resumes,
    "bits": flip_bits,
    "truncated": truncate_journal,
    "emptied": empty_journal,
    "log-gone": remove_log,
    "log-stale": put_strange_log(earlier=True),
    "log-foreign": put_strange_log(earlier=False),
    "bodies-swapped": damage_by_sql(SWAP_BODIES),
    "body-foreign": damage_by_sql(COPY_BODY),
    "rows-removed": damage_by_sql(DELETE_LAST_ROW, DELETE_MIDDLE_ROWS),
    "disk-before": fill_disk(1, STEPS_PER_CHECKPOINT - 5),
    "disk-after": fill_disk(STEPS_PER_CHECKPOINT + 5, None),
    "clock": set_clock_back,
    "two-resumes": resume_twice,
    "version": join_with_other_version,
    "copied-back": put_back_backup,
    "copied-under": put_backup_under_run,
    "searcher-memory": limit_memory("searcher-0"),
    "trainer-memory": limit_memory("trainer"),
    "output-closed": close_output(">&-"),
    "output-full": close_output("> /dev/full"),
    "eio-metrics": fail_disk("metrics.jsonl"),
    "eio-checkpoint": fail_disk("/checkpoints/"),
    "eio-weights": fail_disk("/weights/"),
    "eio-journal": fail_disk("journal.sqlite"),
    "eio-evaluations": fail_disk("evaluations.jsonl"),
    "eio-log": fail_disk("searcher-0.log"),
    "eio-ledger": fail_disk("trainer.result.json", at_the_end=True),
    "eio-summary": fail_disk("summary.json", at_the_end=True),
    **{f"reward-{name}": use_hostile_reward(act) for name, act in ACTS.items()},
    "refill": kill_driver_with_refill,
    "teacher": change_teacher,
    "memory-copy": resume_copy,
    "memory-emptied": empty_memory,
    "searcher-files": limit_searcher_files,
    "moved": move_run,
    "gateway-no-token": attack_gateway(use_strange_token("")),
    "gateway-wrong-token": attack_gateway(use_strange_token("ab" * 32)),
    "gateway-replay": attack_gateway(replay_requests),
    "gateway-body": attack_gateway(send_large_body),
    **{f"served-{part}": kill_served(part) for part in ("server", "trainer", "driver", "agent")},
}


def main() -> int:
    """Makes the runs; returns the exit code, 1 when a requirement was not met."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=4, help="runs of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, help="CSV")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    outcomes = read_outcomes(options.out)
    recorded_runs = {(o.kind, o.number) for o in outcomes}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for number in range(options.runs):
            for kind in kinds:
                if (kind, number) not in recorded_runs:
                    outcomes.append(make_disturbed_run(kind, number, options.steps, folder / f"{kind}-{number}"))
                    print_outcome(outcomes[-1])
                    append_outcome(options.out, outcomes[-1])
    return print_verdict(outcomes)


def make_disturbed_run(kind: str, number: int, steps: int, folder: Path) -> Outcome:
    """Makes one disturbed run to its end; returns its outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    scratch_folder, start = folder / "beside", time.monotonic()
    scratch_folder.mkdir(parents=True)
    run = Run(kind, number, steps, folder / "runs" / "run", scratch_folder, random.Random(f"{kind} {number}"))
    is_hung = is_finished = False
    try:
        try:
            KINDS[kind](run)
        except TooLate as error:
            run.require(False, f"nothing was done to it: {error}")
        is_finished = reaches_end(run)
        run.require(not any("Traceback" in run.text(n) for n in range(len(run.processes))), "a traceback")
        if not is_finished:
            run.violations.append(run.text()[-600:])
        return outcome(run, is_finished, is_hung, time.monotonic() - start)
    except DeadlineMissed as error:
        run.violations.append(str(error))
        return outcome(run, False, True, time.monotonic() - start)
    finally:
        for process, _ in run.processes:
            process.kill()
            process.wait()
        subprocess.run(["umount", "-l", str(run.path.parent)], capture_output=True)


def reaches_end(run: Run) -> bool:
    """Returns whether the run makes all its steps, resumed once if it stopped, and once more to accept lost rows."""
    code = run.exit_code()
    if code:
        run.resume()
        code = run.exit_code()
    if code == 2 and run.is_damaged and "--accept-lost-rows" in run.text():
        run.resume("--accept-lost-rows")
        code = run.exit_code()
    # where the second kill of `resume` came after the last step and the summary, nothing is left to be resumed
    return code == 0 or (code == 2 and f"has made {run.steps} steps, all that were asked for" in run.text())


def outcome(run: Run, is_finished: bool, is_hung: bool, seconds: float) -> Outcome:
    """Returns the outcome of a run from its journal, summary and faults."""
    summary = Summary.read(run.path)
    missing_rows, reported, repeated_uses, closes, accuracy = 0, 0, 0, False, float("nan")
    if summary is None:
        run.violations.append("no summary")
    else:
        rows_after = rows_of(run.path / "journal.sqlite")
        missing_rows = sum(rows_after.get(seq) != row for seq, row in run.acknowledged.items())
        reported = reported_losses(run.path)
        trained = summary.trajectories.trained_total
        branch = {int(row["step"]): row["trajectories"] for row in read_metrics(run.path)}
        uses = int(uses_of(RunDirectory.open(run.path)).sum())
        repeated_uses = abs(uses - trained) + int(abs(sum(branch.values()) - trained))
        closes = summary.tokens.closes() and summary.trajectories.closes()
        figures = {e.version.step: e.value for e in summary.evaluations if e.metric == SAMPLED}
        accuracy = figures.get(run.steps, accuracy)
        required_steps = {0, run.steps}
        if run.kind == "evaluation":
            required_steps |= set(range(0, run.steps, STEPS_PER_CHECKPOINT))
        violation = f"evaluated at {sorted(figures)}, not at all of {sorted(required_steps)}"
        run.require(required_steps <= set(figures), violation)
    return Outcome(
        kind=run.kind,
        number=run.number,
        step=run.step,
        finished=is_finished,
        acknowledged=len(run.acknowledged),
        lost=max(0, missing_rows - reported) if run.is_damaged else missing_rows,
        inflicted=max(missing_rows, reported if run.goes_on else 0) if run.is_damaged else 0,
        reported=reported,
        twice=repeated_uses,
        closes=closes,
        hangs=int(is_hung),
        accuracy=accuracy,
        seconds=round(seconds, 1),
        wrong="; ".join(run.violations),
        faults=" ".join(f"{name}={n}" for name, n in count_faults(run.path).items() if n) if run.path.exists() else "",
    )


def reported_losses(path: Path) -> int:
    """Returns the lost rows that faults.jsonl reports, of the journal as a whole and of single trajectories."""
    sentences = [str(f["what"]) for f in read_faults(path) if f["kind"] == "journal_recoveries"]
    counts = re.findall(r"(\d+) (?:could not be read|trajectories are missing)", " ".join(sentences))
    return sum(map(int, counts)) + count_faults(path)["damaged_trajectories"]


def print_verdict(outcomes: Sequence[Outcome]) -> int:
    """Prints the table; returns exit code 1 unless all is as required."""
    print(
        "\n| kind | runs | finished | acknowledged before | lost | trained twice | account closes | hangs "
        "| inflicted | reported | sampled accuracy |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for kind in [*dict.fromkeys(o.kind for o in outcomes), "all but none"]:
        rows = [o for o in outcomes if o.kind == kind or (kind == "all but none" and o.kind != "none")]
        if rows:
            print(
                f"| {kind} | {len(rows)} | {sum(o.finished for o in rows)} | {sum(o.acknowledged for o in rows):,} "
                f"| {sum(o.lost for o in rows)} | {sum(o.twice for o in rows)} | {sum(o.closes for o in rows)} "
                f"| {sum(o.hangs for o in rows)} | {sum(o.inflicted for o in rows):,} "
                f"| {sum(o.reported for o in rows):,} | {spread([o.accuracy for o in rows])} |"
            )
    failed_outcomes = [o for o in outcomes if o.bad]
    for o in failed_outcomes:
        print(f"NOT AS REQUIRED: {o}")
    return 1 if failed_outcomes else 0


def spread(values: Iterable[float]) -> str:
    numbers = [value for value in values if value == value]  # not NaN
    mean = sum(numbers) / max(1, len(numbers))
    return f"{min(numbers):.1%} to {max(numbers):.1%}, mean {mean:.1%}" if numbers else ""


def print_outcome(o: Outcome) -> None:
    """Prints one line for a run."""
    print(
        f"{o.kind:16} {o.number} at step {o.step:3}: {'finished' if o.finished else 'DID NOT FINISH'}, "
        f"{o.acknowledged} acknowledged, {o.lost} lost, {o.twice} twice, {'closes' if o.closes else 'DOES NOT CLOSE'}, "
        f"{o.hangs} hangs, {o.inflicted} inflicted, {o.reported} reported, {o.accuracy:.1%}, {o.seconds:.0f} s"
        f"{', ' if o.faults else ''}{o.faults}{'; WRONG: ' if o.wrong else ''}{o.wrong}",
        flush=True,
    )


def append_outcome(out: Path | None, o: Outcome) -> None:
    """Appends a row to the file."""
    if out is not None:
        is_new = not out.exists()
        with out.open("a", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Outcome)])
            if is_new:
                writer.writeheader()
            writer.writerow(asdict(o))


def read_outcomes(out: Path | None) -> list[Outcome]:
    """Returns the outcomes that an earlier call has written."""
    if out is None or not out.exists():
        return []
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": "True".__eq__}
    with out.open(newline="") as file:
        return [
            Outcome(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(Outcome)})
            for row in csv.DictReader(file)
        ]


def rows_of(journal: Path) -> Rows:
    """Returns all rows that the journal has acknowledged, by their sequence number."""
    query = "SELECT seq, prompt, tokens, body FROM bodies"
    return {seq: row for seq, *row in query_rows(journal, query)}


def query_rows(journal: Path, query: str) -> list[tuple[Any, ...]]:
    if not journal.exists():
        return []
    with closing(sqlite3.connect(journal, timeout=30.0)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # no tables yet
            return []


if __name__ == "__main__":
    sys.exit(main())
