"""Judges programs and is killed by SIGKILL while it does, ten times at each level: what is left then.

    python lab/benchmarks/code_kills.py --out lab/results/code_kills.csv
    python lab/benchmarks/code_kills.py --run RUNS      # the searcher of a run of one_liners, in the folder RUNS

The judge runs programs that end, that never end and that start threads, four at once. A row says how many processes its
workers and programs were when it was killed, and how many of them went on ten seconds later. With `--run` a searcher is
killed while it judges, and started again by its run, which ends with its accuracy and what it has lost.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import tba
from tba.rewards.code_running import LocalRunner, ProgramLimits
from tba.rewards.sandbox import LEVELS, Sandbox
from tba_lab.code_attacks import answered

CODES = (
    "def f(x): return x",
    "def f(x):\n    while True: pass",
    "from threading import Timer\ndef f(x): return x\nfor _ in range(9): Timer(99, print).start()",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="a judge that is killed")
    parser.add_argument("--kills", type=int, default=10, help="at each level")
    parser.add_argument("--run", type=Path, help="a folder for a run whose searcher is killed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.run is not None:
        kill_searchers(options.run, options.kills)
        return
    rng = random.Random(0)
    rows = [[level, k, *kill_once(level, rng.uniform(1.0, 3.0))] for level in LEVELS for k in range(options.kills)]
    for row in rows:
        print(*row, sep=",")
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["level", "kill", "processes", "left"])
            writer.writerows(rows)


def kill_once(level: Any, seconds: float) -> tuple[int, int]:
    """Kills a judge after so many seconds; returns how many processes there were below it, and how many go on."""
    judge = os.fork()
    if not judge:
        reward = tba.CodeReward(processes=4, seconds=2.0)
        reward.__dict__["_runner"] = LocalRunner(Sandbox(level), ProgramLimits(2.0, 4.0, 256 << 20))
        answers = [f"```\n# {k}\n{CODES[k % len(CODES)]}\n```" for k in range(10_000)]
        reward.judge([answered({"test_list": ["assert f(1) == 1"]}, answer) for answer in answers])
    time.sleep(seconds)  # the moment of the kill, which differs from one to the next
    numbers = kill(judge)
    os.waitpid(judge, 0)
    return numbers


def kill_searchers(folder: Path, kills: int) -> None:
    """Makes a run whose searchers are killed, and prints how it ended."""
    words = [
        "train",
        "one_liners",
        "--steps",
        "200",
        "--run.restarts",
        "99",
        "--runs",
        str(folder),
        "--run-name",
        "kills",
    ]
    with subprocess.Popen([sys.executable, "-m", "tba", *words], stdout=subprocess.DEVNULL) as run:
        done = 0
        while run.poll() is None:
            time.sleep(3.0)  # between two kills, so that a searcher comes back
            judges = [p for p in descendants(run.pid) if any(map(is_worker, children_of(p))) and not is_worker(p)]
            if judges and done < kills:
                done += 1
                print("kill", done, *kill(judges[0]), flush=True)
    summary = json.loads((folder / "kills" / "summary.json").read_text())
    print(
        {name: summary["faults"][name] for name in ("searcher_restarts", "damaged_trajectories", "journal_recoveries")}
    )
    print([(e["metric"], e["value"]) for e in summary["evaluations"] if e["version"].endswith(".200")])


def is_worker(process: int) -> bool:
    try:
        return b"sandbox_worker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def kill(judge: int) -> tuple[int, int]:
    """Kills a process; returns how many processes there were below it, and how many go on."""
    processes = descendants(judge)
    handles = []
    for process in processes:
        with suppress(ProcessLookupError):  # a program that has just ended
            handles.append(os.pidfd_open(process))
    os.kill(judge, signal.SIGKILL)
    going, deadline = set(handles), time.monotonic() + 10.0
    while going and (left := deadline - time.monotonic()) > 0:
        going -= set(select.select(list(going), [], [], left)[0])
    for handle in handles:
        os.close(handle)
    return len(handles), len(going)


def descendants(process: int) -> list[int]:
    """The processes below a process."""
    return [found for child in children_of(process) for found in (child, *descendants(child))]


def children_of(process: int) -> set[int]:
    children: set[int] = set()
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            children |= set(map(int, (task / "children").read_text().split()))
    except OSError:  # it has ended
        return set()
    return children


if __name__ == "__main__":
    main()
