"""Kills each part of one run with SIGKILL: the searcher, the trainer, the driver; then it is resumed.

`lab/benchmarks/faults.py` does it to many short runs; this does it to one run of any recipe, such as a real model's:

    python lab/benchmarks/kill_each.py --at 130 145 165 -- instruct --model.path smollm2 --seed 2 --run-name killed

Each part is killed after the step given for it. At the end every trajectory that was in the journal before a kill has
to be there unchanged, and the run's account has to close.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from faults import Rows, rows_of
from parts import parts_of

from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.runtime.run_lock import is_held

PARTS = ("searcher-0", "trainer", "driver")
SILENCE = 1800  # seconds until a run that makes no step has hung


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=int, nargs=len(PARTS), required=True, help=f"the steps of {', '.join(PARTS)}")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs")
    parser.add_argument("arguments", nargs="+", help="what follows `tba train`, with --run-name")
    options = parser.parse_args()
    path = options.runs / options.arguments[options.arguments.index("--run-name") + 1]
    driver = tba(["train", *options.arguments])
    before: Rows = {}
    for part, at in zip(PARTS, options.at, strict=True):
        wait_for_step(path, at, driver)
        victim = driver.pid if part == "driver" else parts_of(driver.pid)[part]
        before |= rows_of(path / "journal.sqlite")
        os.kill(victim, signal.SIGKILL)
        print(f"{time.strftime('%T')} {part} killed after step {at}, {len(before):,} acknowledged", flush=True)
    driver.wait()
    while is_held(path):  # the parts of a dead driver leave by themselves
        time.sleep(0.1)
    code = tba(["resume", str(path)]).wait()
    after = rows_of(path / "journal.sqlite")
    lost = sum(after.get(number) != row for number, row in before.items())
    summary = Summary.read(path)
    closes = summary is not None and summary.tokens.closes() and summary.trajectories.closes()
    print(f"exit code {code}; {len(before):,} acknowledged before a kill, {lost} lost; the account closes: {closes}")
    return int(code != 0 or lost > 0 or not closes)


def tba(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tba", "train", *arguments])


def wait_for_step(path: Path, step: int, driver: subprocess.Popen[bytes]) -> None:
    """Until the run has made the step, and a little longer, so that the kill comes somewhere inside the next."""
    seen, since = -1, time.monotonic()
    while seen < step:
        time.sleep(0.2)
        step_count = len(read_metrics(path)) if path.exists() else 0
        if step_count != seen:
            seen, since = step_count, time.monotonic()
        if driver.poll() is not None or time.monotonic() - since > SILENCE:
            sys.exit(f"the run ended or stood still at step {seen}, before step {step}")
    time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
