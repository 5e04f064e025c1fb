"""Judges programs and is killed by SIGKILL while it does, ten times at each level: what is left then.

    python lab/benchmarks/code_kills.py --out lab/results/code_kills.csv

The judge runs programs that end, that never end and that start threads, four at once. A row says how many processes its
workers and programs were when it was killed, and how many of them went on ten seconds later.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import select
import signal
import time
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
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
    time.sleep(seconds)
    processes = descendants(judge)
    handles = [os.pidfd_open(process) for process in processes]
    os.kill(judge, signal.SIGKILL)
    os.waitpid(judge, 0)
    going, deadline = set(handles), time.monotonic() + 10.0
    while going and (left := deadline - time.monotonic()) > 0:
        going -= set(select.select(list(going), [], [], left)[0])
    for handle in handles:
        os.close(handle)
    return len(processes), len(going)


def descendants(process: int) -> list[int]:
    """The processes below a process."""
    children: set[int] = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        children |= set(map(int, (task / "children").read_text().split()))
    return [found for child in children for found in (child, *descendants(child))]


if __name__ == "__main__":
    main()
