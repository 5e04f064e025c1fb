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
    searcher-files                       files of the searcher may not grow any more (ulimit -f)
    moved                                the folder of the run moved away under it, and put back once the run has ended
    gateway-no-token, gateway-wrong-token, gateway-replay, gateway-body
                                         to the servers of a cluster run (--runtime cluster): requests and a searcher
                                         that would join without the cluster's token, or with another; rows that were
                                         acknowledged, once more; a body of 1 GB that is announced and sent in part

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

SAMPLED = "pass@1/sampled"
PROBLEMS = 500
EVERY = 24  # steps from one checkpoint to the next: whole weight syncs
SHORT = [
    *("--evaluation.every", "0", "--evaluation.problems", str(PROBLEMS), "--evaluation.pass-k", "0"),
    *("--evaluation.no-greedy", "--run.checkpoint-every", str(EVERY), "--record.no-tensorboard"),
    *("--record.samples", "0", "--replay.pacing.warm-up", "700"),
]
JUDGE = [
    *("--task.judge.seconds", "0.1", "--task.judge.spread", "1.0", "--task.judge.concurrency", "64"),
    *("--task.judge.raises", "0.01", "--task.judge.hangs", "0.001", "--run.reward-deadline", "5"),
]
SILENCE = 20  # seconds until a part that hangs is killed
DISK = 96  # megabytes
ANNOUNCED, SENT = 10**9, 64_000_000  # bytes of a body
AT_A_GATEWAY = ("searcher_restarts", "trainer_restarts", "exchange_restarts", "searchers_given_up", "silences")
LONGER = 20  # times the steps, of a run that is attacked
SLACK = 32_000_000  # bytes that a server's memory may grow by besides
DEADLINE = 600.0  # seconds for anything
POLL = 0.02

Rows = dict[int, list[Any]]  # what the journal holds of each trajectory, by its place


class Hangs(Exception):
    """Something took longer than the deadline."""


class Missed(Exception):
    """The run was over before anything could be done to it."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

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
        whole = self.finished and self.closes and self.inflicted == self.reported
        return not whole or bool(self.lost or self.twice or self.hangs or self.wrong)


@dataclass
class Run:
    """One that is under way."""

    kind: str
    number: int
    steps: int
    path: Path
    scratch: Path  # for what is kept of it, on another disk
    rng: random.Random
    environment: dict[str, str] = field(default_factory=dict)
    output: str = ""  # where a shell sends what it prints
    begun: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)  # with what each said
    acknowledged: Rows = field(default_factory=dict)
    step: int = 0
    inflicting: bool = False  # the journal is damaged
    going: bool = False  # under the run, which acknowledges more until it notices
    wrong: list[str] = field(default_factory=list)

    def begin(self, *overrides: str, recipe: str = "quickstart") -> None:
        name = ("--runs", str(self.path.parent), "--run-name", self.path.name, "--seed", str(self.number))
        self.start("train", recipe, *name, "--steps", str(self.steps), *SHORT, *overrides)

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[bytes]:
        said = self.scratch / f"said-{len(self.begun)}.txt"
        environment = {**os.environ, **self.environment, **more, "COLUMNS": "1000"}
        with said.open("wb") as file:
            command = [sys.executable, "-m", "tba", *arguments]
            if self.output:
                command = ["/bin/sh", "-c", f'exec "$@" {self.output}', "sh", *command]
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.begun.append((process, said))
        return process

    def resume(self, *overrides: str) -> subprocess.Popen[bytes]:
        return self.start("resume", str(self.path), *overrides)

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        return self.begun[-1][0]

    def said(self, n: int = -1) -> str:
        return " ".join(self.begun[n][1].read_text(errors="replace").split())

    def ended(self, n: int = -1) -> int:
        """The exit code."""
        try:
            return self.begun[n][0].wait(DEADLINE)
        except subprocess.TimeoutExpired as error:
            raise Hangs(f"{self.begun[n][0].args!r} goes on: {self.said(n)[-300:]}") from error

    def until(self, condition: Callable[[], Any], of_a_run_that_goes_on: bool = True) -> Any:
        limit = time.monotonic() + DEADLINE
        while not (found := condition()):
            if of_a_run_that_goes_on and self.driver.poll() is not None:
                raise Missed(self.said()[-300:])
            if time.monotonic() > limit:
                raise Hangs("a moment that did not come")
            time.sleep(POLL)
        return found

    def at_some_step(self, low: int = 0, high: int | None = None) -> None:
        """Now and then within its first seconds, where that is a moment of this kind."""
        if low == 0 and self.number % 4 == 3:
            time.sleep(self.rng.uniform(0.5, 8.0))
            self.until((self.path / "recipe.json").exists)
        else:
            step = self.rng.randint(low, self.steps - 15 if high is None else high)
            self.until(lambda: len(read_metrics(self.path)) >= step)
        self.step = len(read_metrics(self.path))

    def kill(self, part: str) -> None:
        victim = self.the(part)
        self.acknowledged = rows_of(self.path / "journal.sqlite")
        os.kill(victim, signal.SIGKILL)

    def the(self, part: str) -> int:
        """The process of a part."""
        if part == "driver":
            return self.driver.pid
        pid: int = self.until(lambda: parts_of(self.driver.pid).get(part))
        return pid

    def kill_driver_and_wait(self) -> None:
        """Until nobody works on the run any longer."""
        self.kill("driver")
        self.ended()
        self.until(lambda: not is_held(self.path), of_a_run_that_goes_on=False)
        self.acknowledged = self.copied()

    def copied(self) -> Rows:
        """What the journal holds, read from a copy: to read it is to open it."""
        for part in ("", "-wal"):
            file = Path(f"{self.path / 'journal.sqlite'}{part}")
            if file.exists():
                shutil.copy(file, self.scratch / f"copy.sqlite{part}")
        return rows_of(self.scratch / "copy.sqlite")

    def require(self, true: object, what: str) -> None:
        if not true:
            self.wrong.append(what)


def killed(part: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.begin()
        run.at_some_step()
        run.kill(part)

    return disturb


def killed_while_grading(part: str) -> Callable[[Run], None]:
    """Behind a judge of 0.1 s, log-normal, whose calls raise and hang now and then."""

    def disturb(run: Run) -> None:
        run.begin(*JUDGE, recipe=str(Path(__file__).with_name("slow_judge.py")))
        run.at_some_step()
        run.kill(part)

    return disturb


def stopped(part: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.begin()
        run.at_some_step()
        victim = run.the(part)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        os.kill(victim, signal.SIGSTOP)
        time.sleep(run.rng.uniform(1.0, 8.0))
        os.kill(victim, signal.SIGCONT)
        run.ended()
        faults = count_faults(run.path)
        run.require(not faults["searcher_restarts"] + faults["trainer_restarts"], "what was continued was restarted")

    return disturb


def hangs(part: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.begin("--run.silence-deadline", str(SILENCE))
        run.at_some_step()
        run.until(heartbeat_file(run.path, part).exists)  # before, it may load a model for an hour
        victim = run.the(part)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        os.kill(victim, signal.SIGSTOP)
        run.ended()
        run.require(count_faults(run.path)["silences"], "its silence was not counted")

    return disturb


def evaluation(run: Run) -> None:
    run.begin("--evaluation.every", str(EVERY), "--evaluation.problems-during", str(PROBLEMS))
    run.at_some_step(low=1)
    done = run.path / "journal.sqlite"
    run.until(lambda: some(done, "SELECT 1 FROM jobs WHERE NOT done AND seconds > 0"))
    time.sleep(run.rng.uniform(0.0, 0.2))
    run.kill(("searcher-0", "trainer", "driver")[run.number % 3])


def _changed(path: Path, facts: Mapping[str, Any]) -> bool:
    return RunDirectory.open(path).facts != facts


def resume(run: Run) -> None:
    run.begin()
    run.at_some_step()
    run.kill_driver_and_wait()
    for attempt in range(2):
        facts, process = RunDirectory.open(run.path).facts, run.resume()
        if attempt:  # once it has begun its incarnation
            run.until(partial(_changed, run.path, facts))
        time.sleep(run.rng.uniform(0.0, 5.0))
        process.kill()
        run.ended()


def bits(run: Run) -> None:
    run.begin()
    run.at_some_step(low=1)
    run.kill_driver_and_wait()
    run.inflicting = True
    files = [f for f in (run.path / "journal.sqlite", run.path / "journal.sqlite-wal") if f.exists()]
    for _ in range(run.rng.randint(1, 8)):
        at = run.rng.randrange(sum(f.stat().st_size for f in files))
        for file in files:
            if at < file.stat().st_size:
                flip(file, at, 1 << run.rng.randrange(8))
                break
            at -= file.stat().st_size


def flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (was,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([was ^ bit]))


def truncated(run: Run) -> None:
    run.begin()
    run.at_some_step(low=1)
    run.kill_driver_and_wait()
    run.inflicting = True
    file = run.path / "journal.sqlite"
    os.truncate(file, run.rng.randrange(1, file.stat().st_size))


def emptied(run: Run) -> None:
    run.begin()
    run.at_some_step(low=EVERY + 5)
    run.kill_driver_and_wait()
    run.inflicting = True
    file = run.path / "journal.sqlite"
    Path(f"{file}-wal").unlink(missing_ok=True)
    if run.number % 2:
        os.truncate(file, 0)
    else:
        file.unlink()


def log_gone(run: Run) -> None:
    """All parts are killed at once, so that nobody moves the log into the journal."""
    run.begin()
    run.at_some_step(low=1)
    parts = (*parts_of(run.driver.pid).values(), *forked(run.driver.pid), run.driver.pid)
    for kind in (signal.SIGSTOP, signal.SIGKILL):
        for part in parts:
            os.kill(part, kind)
    run.ended()
    run.until(lambda: not is_held(run.path), of_a_run_that_goes_on=False)
    run.acknowledged = run.copied()
    run.inflicting = True
    log = Path(f"{run.path / 'journal.sqlite'}-wal")
    if run.number % 2 and log.exists():
        os.truncate(log, run.rng.randrange(log.stat().st_size + 1))
    else:
        log.unlink(missing_ok=True)


def strange_log(earlier: bool) -> Callable[[Run], None]:
    """A log of the run's own, of earlier, or another journal's."""

    def disturb(run: Run) -> None:
        journal, stale = run.path / "journal.sqlite", run.scratch / "stale"
        run.begin()
        run.at_some_step(low=1, high=run.steps // 2)
        if earlier:
            run.until(lambda: committed_frames(wal_frames(Path(f"{journal}-wal"))))
            shutil.copy(f"{journal}-wal", stale)
        else:
            other = run.scratch / "other.sqlite"
            with closing(sqlite3.connect(journal)) as connection:
                connection.execute("VACUUM INTO ?", (str(other),))
            with JournalWriter(other, "searcher-0") as writer:
                writer.count(rejected_trajectories=1)
                shutil.copy(f"{other}-wal", stale)
        run.at_some_step(low=len(read_metrics(run.path)) + 5)
        run.driver.send_signal(signal.SIGINT)
        run.require(run.ended() == 130, f"it did not stop in order: {run.said()[-300:]}")
        run.acknowledged = run.copied()
        shutil.copy(stale, f"{journal}-wal")
        before = journal.read_bytes()
        run.start("replay", str(run.path))
        run.require(run.ended() == 0 and "is passed over" in run.said(), f"replay: {run.said()[-300:]}")
        run.require(journal.read_bytes() == before, "reading changed the journal")
        run.begun.append(run.begun[-2])

    return disturb


def by_sql(*statements: tuple[str, ...]) -> Callable[[Run], None]:
    """Statements, of which each run takes one part, on a journal that nobody uses."""

    def disturb(run: Run) -> None:
        run.begin()
        run.at_some_step(low=1)
        run.kill_driver_and_wait()
        run.inflicting = True
        (last,) = some(run.path / "journal.sqlite", "SELECT max(seq) FROM trajectories")
        places = {"last": last[0], "one": run.rng.randrange(1, last[0] - 100)}
        with closing(sqlite3.connect(run.path / "journal.sqlite")) as connection, connection:
            for statement in statements[run.number % len(statements)]:
                connection.execute(statement, places)

    return disturb


SWAPPED = (
    "CREATE TEMP TABLE two AS SELECT seq, body FROM bodies WHERE seq IN (:one, :one + 50)",
    "UPDATE bodies SET body = (SELECT body FROM two WHERE two.seq = 2 * :one + 50 - bodies.seq) "
    "WHERE seq IN (:one, :one + 50)",
)
COPIED = ("UPDATE bodies SET body = (SELECT body FROM bodies WHERE seq = :one + 50) WHERE seq = :one",)
LAST_ROW = ("DELETE FROM trajectories WHERE seq = :last", "DELETE FROM bodies WHERE seq = :last")
MIDDLE = ("DELETE FROM bodies WHERE seq BETWEEN :one AND :one + 77",)


def copied_back(run: Run) -> None:
    older = backed_up(run)
    run.kill_driver_and_wait()
    run.inflicting = True
    file = run.path / "journal.sqlite"
    for part in ("-wal", "-shm"):
        Path(f"{file}{part}").unlink(missing_ok=True)
    shutil.copy(older, file)


def copied_under(run: Run) -> None:
    older = backed_up(run)
    parts = parts_of(run.driver.pid).values()
    for part in parts:
        os.kill(part, signal.SIGSTOP)
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    run.inflicting = run.going = True
    shutil.copyfile(older, run.path / "journal.sqlite")  # in place
    if run.number % 2:
        os.truncate(run.path / "journal.sqlite-wal", 0)
    for part in parts:
        os.kill(part, signal.SIGCONT)
    if run.number % 2:
        ends_in_a_sentence(run)
    else:  # it writes its log, which may have all that is newer, over the file in its turn
        run.ended()


def backed_up(run: Run) -> Path:
    """Begins the run, and goes on to some later step; returns a copy of its journal."""
    run.begin()
    run.at_some_step(low=1, high=run.steps // 2)
    older, then = run.scratch / "older.sqlite", run.step
    with closing(sqlite3.connect(run.path / "journal.sqlite", timeout=30.0)) as journal:
        journal.execute("VACUUM INTO ?", (str(older),))
    run.at_some_step(low=then + 5)
    return older


def little_memory(part: str) -> Callable[[Run], None]:
    """It may end the run, or the part, which is started again with as much as it wants."""

    def disturb(run: Run) -> None:
        run.begin("--run.silence-deadline", str(3 * SILENCE))
        run.at_some_step(low=1)
        victim = run.the(part)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        pages = int(Path(f"/proc/{victim}/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + run.rng.choice((0, 1, 4, 16)) * 1_000_000
        with suppress(ProcessLookupError):
            resource.prlimit(victim, resource.RLIMIT_AS, (most, most))
        code = run.ended()
        run.require(not code or "could not get the memory it needs" in run.said(), f"{code}: {run.said()[-300:]}")

    return disturb


def no_output(where: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        run.output = where
        run.begin()
        run.at_some_step(low=1)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        run.require(run.ended() == 0, f"it did not train to its end: {run.said()[-300:]}")

    return disturb


def disk_errors(files: str, at_the_end: bool = False) -> Callable[[Run], None]:
    """From some moment on; at_the_end: they are written then only."""

    def disturb(run: Run) -> None:
        library, when = run.scratch / "eio.so", run.scratch / "now"
        source = Path(__file__).with_name("eio.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        run.environment |= {"LD_PRELOAD": str(library), "EIO_FILES": files, "EIO_WHEN": str(when)}
        run.begin("--evaluation.every", str(EVERY), "--evaluation.problems-during", "20")
        run.at_some_step(low=1, high=run.steps - 15 if at_the_end else run.steps // 2)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        when.touch()
        if files == "searcher-0.log":  # a log that cannot be written costs nobody anything
            run.ended()
        else:
            ends_in_a_sentence(run)
        when.unlink()
        run.until(lambda: not is_held(run.path), of_a_run_that_goes_on=False)

    return disturb


def moved(run: Run) -> None:
    run.begin()
    run.at_some_step(low=1)
    away = run.path.with_name("away")
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    run.path.rename(away)
    ends_in_a_sentence(run)
    run.require(not run.path.exists(), "another folder was made")
    away.rename(run.path)
    run.until(lambda: not is_held(run.path), of_a_run_that_goes_on=False)


def ends_in_a_sentence(run: Run) -> None:
    code = run.ended()
    last = run.begun[-1][1].read_text(errors="replace").strip().splitlines()[-1:]
    run.require(code == 2 and last and last[0].startswith("tba: "), f"exit {code}: {run.said()[-300:]}")


def full_disk(low: int, high: int | None) -> Callable[[Run], None]:
    """By filling a small one, where this process may mount; else by a limit on the size of files of all processes."""

    def disturb(run: Run) -> None:
        run.path.parent.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(run.path.parent)]
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
        run.begin()
        run.at_some_step(low, high)
        ballast = run.path.parent / "ballast"
        if mounted:
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:  # ends: with no space left
                    file.write(bytes(1 << 16))
        else:
            most = (run.path / "journal.sqlite").stat().st_size
            for process in (run.driver.pid, *forked(run.driver.pid), *parts_of(run.driver.pid).values()):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (most, most))
        code = run.ended()
        run.require(code == 2 and "is full: free some space, then continue with" in run.said(), f"{code}: {run.said()}")
        run.until(lambda: not is_held(run.path), of_a_run_that_goes_on=False)
        run.acknowledged = run.copied()
        ballast.unlink(missing_ok=True)

    return disturb


def hostile_reward(act: str) -> Callable[[Run], None]:
    def disturb(run: Run) -> None:
        when = run.scratch / "now"
        run.environment |= {"HOSTILE_WHEN": str(when), "HOSTILE_ACT": act}
        recipe = str(Path(__file__).with_name("hostile_reward.py"))
        run.begin("--run.reward-deadline", "5", recipe=recipe)
        run.at_some_step(low=1)
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        when.touch()
        code, exits = run.ended(), act == "exit"  # what ends its process by itself is not started again
        run.require(code == (1 if exits else 0), f"exit {code}: {run.said()[-300:]}")
        run.require(not when.exists(), "the reward did nothing")
        if exits:
            run.require("ended with exit code 3" in run.said(), f"the exit code is not named: {run.said()[-300:]}")
        if act == "hang":
            rejected = Summary.read(run.path)
            run.require(rejected and rejected.trajectories.rejected, "no answer was rejected")

    return disturb


def refill(run: Run) -> None:
    run.begin("--replay.selection.refill")
    run.at_some_step()
    run.kill("driver")


def teacher(run: Run) -> None:
    """A teacher that is gone is named in a sentence, and so is another one in its place."""
    folder, away = run.scratch / "teacher", run.scratch / "away"
    shutil.copytree(BASE, folder)
    run.begin("--teacher.paths", str(folder), recipe="distil")
    run.at_some_step(low=1)
    run.kill_driver_and_wait()
    folder.rename(away)
    if run.number % 2:
        shutil.copytree(away, folder)
        weights = bytearray((folder / "model.safetensors").read_bytes())
        weights[len(weights) // 2 :] = bytes(len(weights) - len(weights) // 2)
        (folder / "model.safetensors").write_bytes(weights)
    run.resume()
    ends_in_a_sentence(run)
    shutil.rmtree(folder, ignore_errors=True)
    away.rename(folder)


def memory_copy(run: Run) -> None:
    run.begin("--publish.in-memory")
    run.at_some_step(low=5, high=run.steps // 2)
    copy = run.scratch / "copy" / "run"
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    with suppress(shutil.Error):  # files that come and go
        shutil.copytree(run.path, copy, symlinks=True)
    going = run.begun[-1]
    run.start("resume", str(copy), "--accept-lost-rows")
    code = run.ended()
    run.require(code in (0, 2), f"the copy's resume ended with {code}: {run.said()[-300:]}")
    run.begun.append(going)
    run.require(run.ended() == 0, f"the run itself did not go on: {run.said()[-300:]}")


def searcher_files(run: Run) -> None:
    run.begin()
    run.at_some_step(low=1)
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    most = (run.path / "journal.sqlite").stat().st_size
    resource.prlimit(run.the("searcher-0"), resource.RLIMIT_FSIZE, (most, most))
    code = run.ended()
    run.require(code in (0, 2), f"exit {code}: {run.said()[-300:]}")


def at_the_gateway(attack: Callable[[Run, dict[str, tuple[int, int]]], None]) -> Callable[[Run], None]:
    """The run goes on, and is told of nothing."""

    def disturb(run: Run) -> None:
        run.steps *= LONGER  # so that it lasts
        run.environment |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        run.begin("--runtime", "cluster", "--cluster.object-store-gb", "0.3")
        run.at_some_step(low=1, high=run.steps // (2 * LONGER))
        run.acknowledged = rows_of(run.path / "journal.sqlite")
        servers, going = listeners(run.driver.pid), run.begun[-1]
        run.require(set(servers) == set(METHODS), f"only {sorted(servers)} were there")
        attack(run, servers)
        run.begun.append(going)
        run.require(run.driver.poll() is None, "the run was over before")
        run.require(run.ended() == 0, f"the run itself did not go on: {run.said()[-300:]}")
        faults = count_faults(run.path)
        noticed = [name for name in AT_A_GATEWAY if faults[name]]
        run.require(not noticed, f"the run has met {noticed}")

    return disturb


def strange_token(token: str) -> Callable[[Run, dict[str, tuple[int, int]]], None]:
    """Requests, and a searcher that would join, with this token instead of the cluster's; empty: without any."""

    def attack(run: Run, servers: dict[str, tuple[int, int]]) -> None:
        for name, (_, port) in servers.items():
            status = status_of(port, METHODS[name], {"authorization": f"Bearer {token}"} if token else {})
            run.require(status == "UNAUTHENTICATED", f"{name} answered {status}")
        address = f"127.0.0.1:{servers['gcs_server'][1]}"
        variables = {"RAY_AUTH_TOKEN": token, "HOME": str(run.scratch), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        run.start("search", "--run", run.path.name, "--address", address, **variables)
        ends_in_a_sentence(run)

    return attack


def replayed(run: Run, servers: dict[str, tuple[int, int]]) -> None:
    script, address = Path(__file__).with_name("gateway_requests.py"), f"127.0.0.1:{servers['gcs_server'][1]}"
    command, variables = [sys.executable, str(script), str(run.path), address], {**os.environ, **run.environment}
    process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE)
    run.require(process.returncode == 0, f"it was not replayed: {process.stderr[-300:]}")
    (twice,) = some(run.path / "journal.sqlite", "SELECT count(*) - count(DISTINCT uid) FROM trajectories")
    run.require(twice == (0,), f"{twice[0]} rows are there twice")


def large_body(run: Run, servers: dict[str, tuple[int, int]]) -> None:
    for name, (process, port) in servers.items():
        before = most_memory(process)
        sent_bytes = Announced(port, METHODS[name], ANNOUNCED).send(SENT)
        growth = most_memory(process) - before
        run.require(growth <= sent_bytes + SLACK, f"{name} was sent {sent_bytes} bytes and has grown by {growth}")


def most_memory(process: int) -> int:
    """The most bytes that a process had at any time."""
    (line,) = (line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


CLOCK = """
import os, time
real = time.time
def set_back():
    with open(os.environ["CLOCK"]) as file:
        return real() - float(file.read() or 0)
time.time = set_back
"""


def clock(run: Run) -> None:
    """In every process of the run `time.time` is real time less what a file says."""
    (run.scratch / "sitecustomize.py").write_text(CLOCK)
    by = run.scratch / "clock"
    by.write_text("0")
    path = f"{run.scratch}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run.environment |= {"PYTHONPATH": path, "CLOCK": str(by)}
    run.begin()
    run.at_some_step(high=run.steps // 2)
    by.write_text("3600")
    run.at_some_step(low=run.steps // 2)
    run.kill("driver")
    run.ended()
    by.write_text("86400")
    run.resume()
    run.ended()
    seconds = [row["wall_seconds"] for row in read_metrics(run.path)]
    run.require(0 <= min(seconds) <= max(seconds) < 2 * DEADLINE, f"wall-clock from {min(seconds)} to {max(seconds)} s")


def two_resumes(run: Run) -> None:
    run.begin()
    run.at_some_step(low=EVERY + 5)
    run.kill_driver_and_wait()
    run.resume()
    run.resume()
    codes = [run.ended(n) for n in (-2, -1)]
    run.require(sorted(codes) == [0, 2], f"two resumes ended with {codes}")
    if 2 in codes:
        said = run.said(codes.index(2) - 2)
        sentence = r"tba: the run at \S+ (is still in progress|has made \d+ steps, all)[^:]*: .*"
        run.require(re.fullmatch(sentence, said), f"refused with: {said[-300:]}")
    if 0 in codes:
        run.begun.append(run.begun[codes.index(0) - 2])


def other_version(run: Run) -> None:
    shutil.copytree(Path(tba.__file__).parent, run.scratch / "tba", ignore=shutil.ignore_patterns("*.pyc"))
    with (run.scratch / "tba" / "types.py").open("a") as file:
        file.write("# another version\n")
    run.begin()
    run.at_some_step(low=1)
    run.acknowledged = rows_of(run.path / "journal.sqlite")
    going = run.begun[-1]
    run.start("search", "--run", str(run.path), PYTHONPATH=str(run.scratch))
    code, said = run.ended(), run.said()
    sentence = r"tba: a searcher that would join uses tba (.+), but the run uses tba (.+): start it from the same .*"
    found = re.fullmatch(sentence, said)
    run.require(code == 2 and found and found[1] != found[2], f"exit {code}: {said[-300:]}")
    run.begun.append(going)


ACTS = {"exits": "exit", "forks": "fork", "hangs": "hang", "memory": "memory", "closes": "closed"}
KINDS: dict[str, Callable[[Run], None]] = {
    "none": Run.begin,
    "searcher": killed("searcher-0"),
    "trainer": killed("trainer"),
    "driver": killed("driver"),
    "searcher-grading": killed_while_grading("searcher-0"),
    "driver-grading": killed_while_grading("driver"),
    "searcher-stopped": stopped("searcher-0"),
    "trainer-stopped": stopped("trainer"),
    "searcher-hangs": hangs("searcher-0"),
    "trainer-hangs": hangs("trainer"),
    "evaluation": evaluation,
    "resume": resume,
    "bits": bits,
    "truncated": truncated,
    "emptied": emptied,
    "log-gone": log_gone,
    "log-stale": strange_log(earlier=True),
    "log-foreign": strange_log(earlier=False),
    "bodies-swapped": by_sql(SWAPPED),
    "body-foreign": by_sql(COPIED),
    "rows-removed": by_sql(LAST_ROW, MIDDLE),
    "disk-before": full_disk(1, EVERY - 5),
    "disk-after": full_disk(EVERY + 5, None),
    "clock": clock,
    "two-resumes": two_resumes,
    "version": other_version,
    "copied-back": copied_back,
    "copied-under": copied_under,
    "searcher-memory": little_memory("searcher-0"),
    "trainer-memory": little_memory("trainer"),
    "output-closed": no_output(">&-"),
    "output-full": no_output("> /dev/full"),
    "eio-metrics": disk_errors("metrics.jsonl"),
    "eio-checkpoint": disk_errors("/checkpoints/"),
    "eio-weights": disk_errors("/weights/"),
    "eio-journal": disk_errors("journal.sqlite"),
    "eio-evaluations": disk_errors("evaluations.jsonl"),
    "eio-log": disk_errors("searcher-0.log"),
    "eio-ledger": disk_errors("trainer.result.json", at_the_end=True),
    "eio-summary": disk_errors("summary.json", at_the_end=True),
    **{f"reward-{name}": hostile_reward(act) for name, act in ACTS.items()},
    "refill": refill,
    "teacher": teacher,
    "memory-copy": memory_copy,
    "searcher-files": searcher_files,
    "moved": moved,
    "gateway-no-token": at_the_gateway(strange_token("")),
    "gateway-wrong-token": at_the_gateway(strange_token("ab" * 32)),
    "gateway-replay": at_the_gateway(replayed),
    "gateway-body": at_the_gateway(large_body),
}


def main() -> int:
    """The exit code: 1 when a requirement was not met."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=4, help="runs of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, help="CSV")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    found = read(arguments.out)
    there = {(o.kind, o.number) for o in found}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        for number in range(arguments.runs):
            for kind in kinds:
                if (kind, number) not in there:
                    found.append(disturbed(kind, number, arguments.steps, folder / f"{kind}-{number}"))
                    say(found[-1])
                    note(arguments.out, found[-1])
    return verdict(found)


def disturbed(kind: str, number: int, steps: int, folder: Path) -> Outcome:
    """One run to its end."""
    shutil.rmtree(folder, ignore_errors=True)
    scratch, began = folder / "beside", time.monotonic()
    scratch.mkdir(parents=True)
    run = Run(kind, number, steps, folder / "runs" / "run", scratch, random.Random(f"{kind} {number}"))
    hung = finished = False
    try:
        try:
            KINDS[kind](run)
        except Missed as missed:
            run.require(False, f"nothing was done to it: {missed}")
        finished = to_its_end(run)
        run.require(not any("Traceback" in run.said(n) for n in range(len(run.begun))), "a traceback")
        if not finished:
            run.wrong.append(run.said()[-600:])
        return outcome(run, finished, hung, time.monotonic() - began)
    except Hangs as error:
        run.wrong.append(str(error))
        return outcome(run, False, True, time.monotonic() - began)
    finally:
        for process, _ in run.begun:
            process.kill()
            process.wait()
        subprocess.run(["umount", "-l", str(run.path.parent)], capture_output=True)


def to_its_end(run: Run) -> bool:
    """Whether it has made all its steps; taken up once if it was left, and told once that rows are lost."""
    code = run.ended()
    if code:
        run.resume()
        code = run.ended()
    if code == 2 and run.inflicting and "--accept-lost-rows" in run.said():
        run.resume("--accept-lost-rows")
        code = run.ended()
    # where the second kill of `resume` came after the last step and the summary, nothing is left to be resumed
    return code == 0 or (code == 2 and f"has made {run.steps} steps, all that were asked for" in run.said())


def outcome(run: Run, finished: bool, hung: bool, seconds: float) -> Outcome:
    """What the run left."""
    summary = Summary.read(run.path)
    missing, reported, twice, closes, accuracy = 0, 0, 0, False, float("nan")
    if summary is None:
        run.wrong.append("no summary")
    else:
        after = rows_of(run.path / "journal.sqlite")
        missing = sum(after.get(seq) != row for seq, row in run.acknowledged.items())
        reported = reported_lost(run.path)
        trained = summary.trajectories.trained_total
        branch = {int(row["step"]): row["trajectories"] for row in read_metrics(run.path)}
        uses = int(uses_of(RunDirectory.open(run.path)).sum())
        twice = abs(uses - trained) + int(abs(sum(branch.values()) - trained))
        closes = summary.tokens.closes() and summary.trajectories.closes()
        figures = {e.version.step: e.value for e in summary.evaluations if e.metric == SAMPLED}
        accuracy = figures.get(run.steps, accuracy)
        wanted = {0, run.steps} | (set(range(0, run.steps, EVERY)) if run.kind == "evaluation" else set())
        run.require(wanted <= set(figures), f"evaluated at {sorted(figures)}, not at all of {sorted(wanted)}")
    return Outcome(
        kind=run.kind,
        number=run.number,
        step=run.step,
        finished=finished,
        acknowledged=len(run.acknowledged),
        lost=max(0, missing - reported) if run.inflicting else missing,
        inflicted=max(missing, reported if run.going else 0) if run.inflicting else 0,
        reported=reported,
        twice=twice,
        closes=closes,
        hangs=int(hung),
        accuracy=accuracy,
        seconds=round(seconds, 1),
        wrong="; ".join(run.wrong),
        faults=" ".join(f"{name}={n}" for name, n in count_faults(run.path).items() if n) if run.path.exists() else "",
    )


def reported_lost(path: Path) -> int:
    """What the run says in faults.jsonl: of the journal as a whole, and of single trajectories that were damaged."""
    said = [str(f["what"]) for f in read_faults(path) if f["kind"] == "journal_recoveries"]
    lost = re.findall(r"(\d+) (?:could not be read|trajectories are missing)", " ".join(said))
    return sum(map(int, lost)) + count_faults(path)["damaged_trajectories"]


def verdict(found: Sequence[Outcome]) -> int:
    """The table, and whether all is as required."""
    print(
        "\n| kind | runs | finished | acknowledged before | lost | trained twice | account closes | hangs "
        "| inflicted | reported | sampled accuracy |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for kind in [*dict.fromkeys(o.kind for o in found), "all but none"]:
        of = [o for o in found if o.kind == kind or (kind == "all but none" and o.kind != "none")]
        if of:
            print(
                f"| {kind} | {len(of)} | {sum(o.finished for o in of)} | {sum(o.acknowledged for o in of):,} "
                f"| {sum(o.lost for o in of)} | {sum(o.twice for o in of)} | {sum(o.closes for o in of)} "
                f"| {sum(o.hangs for o in of)} | {sum(o.inflicted for o in of):,} | {sum(o.reported for o in of):,} "
                f"| {spread([o.accuracy for o in of])} |"
            )
    bad = [o for o in found if o.bad]
    for o in bad:
        print(f"NOT AS REQUIRED: {o}")
    return 1 if bad else 0


def spread(values: Iterable[float]) -> str:
    known = [v for v in values if v == v]
    return f"{min(known):.1%} to {max(known):.1%}, mean {sum(known) / len(known):.1%}" if known else ""


def say(o: Outcome) -> None:
    """One line for a run."""
    print(
        f"{o.kind:16} {o.number} at step {o.step:3}: {'finished' if o.finished else 'DID NOT FINISH'}, "
        f"{o.acknowledged} acknowledged, {o.lost} lost, {o.twice} twice, {'closes' if o.closes else 'DOES NOT CLOSE'}, "
        f"{o.hangs} hangs, {o.inflicted} inflicted, {o.reported} reported, {o.accuracy:.1%}, {o.seconds:.0f} s"
        f"{', ' if o.faults else ''}{o.faults}{'; WRONG: ' if o.wrong else ''}{o.wrong}",
        flush=True,
    )


def note(out: Path | None, o: Outcome) -> None:
    """A row more."""
    if out is not None:
        new = not out.exists()
        with out.open("a", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Outcome)])
            if new:
                writer.writeheader()
            writer.writerow(asdict(o))


def read(out: Path | None) -> list[Outcome]:
    """What an earlier call has noted."""
    if out is None or not out.exists():
        return []
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": "True".__eq__}
    with out.open(newline="") as file:
        return [
            Outcome(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(Outcome)})
            for row in csv.DictReader(file)
        ]


def rows_of(journal: Path) -> Rows:
    """All that the journal has acknowledged."""
    query = "SELECT seq, prompt, tokens, body FROM bodies"
    return {seq: row for seq, *row in some(journal, query)}


def some(journal: Path, query: str) -> list[tuple[Any, ...]]:
    if not journal.exists():
        return []
    with closing(sqlite3.connect(journal, timeout=30.0)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # no tables yet
            return []


if __name__ == "__main__":
    sys.exit(main())
