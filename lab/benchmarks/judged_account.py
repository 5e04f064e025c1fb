"""Whether every answer is accounted for when judges are slow, fail and hang, and the run is killed; what calls cost.

    python lab/benchmarks/judged_account.py [whole] [killed] [calls] [--answers 10000] [--kills 10] [--keep FOLDER]

The quickstart behind a judge whose calls last 2 s on average (log-normal, 1.5 the deviation of the logarithm), of which
1 % raise and 1 % hang; 500 at once, 30 s for each (`--run.reward-deadline`).

`whole`: until so many answers are in the journal; then the run is stopped in order. Required: rows + rejected + in
flight = generated; the journal has as many rows as the run says; by the judge's own log each verdict within the
deadline has its row and each row its verdict.

`killed`: the same, and at random moments on the way everything, the searcher or the driver is killed (kill -9); then
the run is resumed, if it has ended. Required beside that: no answer that was judged is asked about again or missing,
which is a verdict without a row. Verdicts of the last 0.1 s before a kill may not have reached the journal, and are
counted apart. Calls that a kill cut off are answers that waited: at least as many are in flight by the account.

`calls`: CPU seconds of the searcher for 1,000 answers, with about 500 calls in flight against none, interleaved.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from judged_runs import BARE, PATIENCE, JudgedRun, judge
from parts import parts_of

from tba.record.summary import Summary
from tba_lab.judge import account

JUST_BEFORE = 0.1  # seconds before a kill in which a verdict may not have reached the journal
LONG = ("--steps", "1000000", "--run.restarts", "100")  # until it is stopped
VICTIMS = ("everything", "searcher-0", "driver")
CONCURRENCY = 500
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Demands:
    """What the command asks for."""

    answers: int
    kills: int
    deadline: float
    judge: tuple[str, ...]
    seed: int
    minutes: float  # of a run, at most
    repeats: int
    span: float  # seconds over which CPU time is measured


def main() -> int:
    """The exit code: 1 when a requirement was not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["whole", "killed", "calls"], metavar="whole, killed, calls")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--spread", type=float, default=1.5)
    parser.add_argument("--raises", type=float, default=0.01)
    parser.add_argument("--hangs", type=float, default=0.01)
    parser.add_argument("--deadline", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="of a run, at most")
    parser.add_argument("--repeats", type=int, default=3, help="of `calls`, each side")
    parser.add_argument("--span", type=float, default=60.0, help="seconds over which `calls` measures CPU time")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    options = parser.parse_args()
    failures = ("--task.judge.spread", f"{options.spread}", "--task.judge.raises", f"{options.raises}")
    fails = judge(options.seconds, CONCURRENCY, *failures, "--task.judge.hangs", f"{options.hangs}")
    demands = Demands(
        options.answers,
        options.kills,
        options.deadline,
        fails,
        options.seed,
        options.minutes,
        options.repeats,
        options.span,
    )
    right = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for part in options.parts:
            right &= {"whole": whole, "killed": killed, "calls": calls}[part](folder, demands)
    return 0 if right else 1


def start(folder: Path, name: str, *arguments: str) -> JudgedRun:
    """Start a run under a name; an earlier one is removed."""
    run = JudgedRun(folder / name)
    for path in (run.path, run.log):
        shutil.rmtree(path, ignore_errors=True)
    run.train(*BARE, *LONG, *arguments)
    return run


def whole(folder: Path, demands: Demands) -> bool:
    run = start(folder, "whole", *demands.judge, "--run.reward-deadline", f"{demands.deadline:g}")
    code = run.end(60 * demands.minutes, lambda: run.rows() >= demands.answers)
    return checked("whole", run, code, demands.deadline, [])


def killed(folder: Path, demands: Demands) -> bool:
    rng = random.Random(demands.seed)
    run = start(folder, "killed", *demands.judge, "--run.reward-deadline", f"{demands.deadline:g}")
    limit, spans = time.monotonic() + 60 * demands.minutes, list[tuple[float, float]]()
    moments = sorted(rng.uniform(0.05, 0.95) * demands.answers for _ in range(demands.kills))
    for number, moment in enumerate(moments):
        target = max(moment, run.rows() + 1)  # something has to come of each resume before the next kill
        while run.rows() < target and run.processes[-1].poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 1.0))
        code = run.processes[-1].poll()
        if code is not None or time.monotonic() >= limit:
            print(f"killed: ended with {code} before kill {number}, at {run.rows():,} answers: see {run.output}")
            return False
        spans.append(kill(run, VICTIMS[number % len(VICTIMS)]))
    last = max(demands.answers, run.rows() + 1)
    code = run.end(max(0.0, limit - time.monotonic()), lambda: run.rows() >= last)
    return checked("killed", run, code, demands.deadline, spans)


def kill(run: JudgedRun, victim: str) -> tuple[float, float]:
    """Kill, and resume what has ended; returns the span of time in which verdicts may have been lost with it."""
    driver, rows = run.processes[-1], run.rows()
    pid = parts_of(driver.pid).get(victim)
    now = time.monotonic()
    if victim == "everything":
        run.kill()
    else:
        os.kill(pid or driver.pid, signal.SIGKILL)
    if victim == "everything" or pid is None:
        driver.wait()
        run.until_free()  # the parts of a dead driver leave by themselves
        span = now - JUST_BEFORE, time.monotonic()
        run.start("resume", str(run.path))
    else:
        span = now - JUST_BEFORE, now + JUST_BEFORE
    print(f"{time.strftime('%T')} {victim} killed at {rows:,} answers", flush=True)
    return span


def checked(name: str, run: JudgedRun, code: int, deadline: float, spans: list[tuple[float, float]]) -> bool:
    """Print the account of a run, and whether it is as required."""
    counts, summary = run.counts(), Summary.read(run.path)
    done = account(run.answers(), run.calls(), deadline, [*spans, (run.stopped - JUST_BEFORE, float("inf"))])
    accounted = done.rows + counts["rejected"] + counts["in_flight"]
    requirements = {
        "it ended in order": code in (0, 130),
        "rows + rejected + in flight = generated": accounted == counts["generated"],
        "the account closes": summary is not None and summary.trajectories.closes() and summary.tokens.closes(),
        "no verdict is lost or asked for again": done.lost == 0,
        "no row is without a verdict": done.invented == 0,
        "each call that was cut off is in flight": done.cut_off <= counts["in_flight"],
    }
    print(
        f"{name}: exit code {code}; {done.rows:,} rows + {counts['rejected']:,} rejected + {counts['in_flight']:,} in "
        f"flight = {accounted:,}, generated {counts['generated']:,}\n{name}: {done}"
    )
    for requirement, holds in requirements.items():
        print(f"{name}: {requirement}: {'yes' if holds else 'NO'}")
    sys.stdout.flush()
    return all(requirements.values())


def calls(folder: Path, demands: Demands) -> bool:
    """Print the ratio of a searcher's CPU time for an answer, with about 500 calls in flight and with none."""
    cost: dict[str, list[float]] = {"none": [], "many": []}
    latency, seconds = 0.0, demands.span
    for number in range(demands.repeats):
        for side in cost:
            run = start(folder, f"{side}-{number}", *judge(latency if side == "many" else 0.0, CONCURRENCY))
            cpu, answers = searcher_cpu(run, seconds)
            cost[side].append(1000 * cpu / answers)
            latency = latency or CONCURRENCY * seconds / answers  # so that about 500 are under way at this rate
            flying = fmean(in_flight(run)) if side == "many" else 0.0
            print(f"{side}: {cost[side][-1]:.3f} CPU s for 1,000 answers, {answers / seconds:.0f} answers/s, "
                  f"{flying:.0f} calls in flight", flush=True)  # fmt: skip
    ratio = fmean(cost["many"]) / fmean(cost["none"])
    print(f"calls: CPU of a searcher with {latency:.2f} s a call against none: {ratio:.2f} times (at most 1.1)")
    return ratio <= 1.1


def searcher_cpu(run: JudgedRun, seconds: float) -> tuple[float, int]:
    """Returns the CPU seconds of the searcher over so many seconds after the first updates, and the answers that came.

    The run is then stopped.
    """
    limit = time.monotonic() + PATIENCE
    while not (run.path / "metrics.jsonl").exists() or run.rows() < 2000:
        if run.processes[-1].poll() is not None or time.monotonic() > limit:
            sys.exit(f"{run.path.name} does not get on: see {run.output}")
        time.sleep(0.1)
    pid = parts_of(run.processes[-1].pid)["searcher-0"]
    before, rows = cpu_seconds(pid), run.rows()
    time.sleep(seconds)
    result = cpu_seconds(pid) - before, max(1, run.rows() - rows)
    run.end(0.0)
    return result


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and of its children that have ended."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, values[11:15])) / TICK


def in_flight(run: JudgedRun) -> list[int]:
    """Returns how many calls were under way, at a hundred moments of the second half of the run."""
    log = run.calls()
    begin, end = log[len(log) // 2].began, run.stopped
    moments = [begin + (end - begin) * i / 100 for i in range(100)]
    return [sum(c.began <= at and (c.ended is None or c.ended > at) for c in log) for at in moments]


if __name__ == "__main__":
    sys.exit(main())
