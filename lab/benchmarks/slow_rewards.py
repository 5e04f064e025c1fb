"""What slow rewards do to a run: the quickstart behind judges that wait, each run by `tba train` for a bounded time.

    python lab/benchmarks/slow_rewards.py [--rows few short tail 0.2 1 async] [--minutes 5] [--out FILE.jsonl]

| row | judge | asked of the run |
|---|---|---|
| `few` | 2 s, concurrency 4 | the first update within 1.1 x warm-up / judge rate |
| `short` | 0.25 s, concurrency 8, `--run.reward-deadline 20` | exit code 0, nothing lost |
| `tail` | 10 ms, 1 in 300 takes 20 s, concurrency 64; then without stragglers | 0.95 of the updates, 1.2 of the lag |
| `0.2`, `1` | 0.2 and 1 s, concurrency 256 | 0.9 of the possible rate of judged answers |
| `async` | `async def`, 0.25 s, no concurrency set | more than one call at once |

The possible rate is the smaller of concurrency / latency and what comes when the judge is free, which two runs of a
minute measure on the same cores, beside the same trainer (`free`, before the rows and after them). Rates count verdicts
from the first update to the end; the wait for the first update counts from the first call. A verdict without a row in
the journal is lost, unless it came after the run was asked to stop. `short` makes a number of updates; all others are
stopped after their minutes, with exit code 130.

Needs an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from judged_runs import BARE, JudgedRun, judge

from tba_lab.judge import Call, account

WARM_UP = 544  # answers, the quickstart's
LONG = ("--steps", "1000000")  # until it is stopped
TAIL = ("--task.judge.tail-every", "300", "--task.judge.tail-seconds", "20")


@dataclass(frozen=True)
class Row:
    """One run that is to be made."""

    name: str
    arguments: tuple[str, ...]
    possible: float | None  # judged answers a second that concurrency and latency allow; None: no bound
    minutes: float | None = None  # None: as the command says


FREE = (Row("free", (*judge(0.0, 64), *LONG), None, 1.0),)
ROWS = {
    "few": (Row("few", (*judge(2.0, 4), *LONG), 2.0, 8.0),),
    "short": (Row("short", (*judge(0.25, 8), "--run.reward-deadline", "20", "--steps", "40"), 32.0, 15.0),),
    "tail": (
        Row("tail", (*judge(0.01, 64), *TAIL, *LONG), 64 / (0.01 + 20 / 300)),
        Row("no tail", (*judge(0.01, 64), *LONG), 6400.0),
    ),
    "0.2": (Row("0.2", (*judge(0.2, 256), *LONG), 1280.0),),
    "1": (Row("1", (*judge(1.0, 256), *LONG), 256.0),),
    "async": (Row("async", (*judge(0.25, 0, "--task.judge.coroutine"), *LONG), None),),
}


@dataclass(frozen=True)
class Outcome:
    """What one run came to. Seconds, and answers a second."""

    row: str
    code: int
    first_update: float | None  # after the first call; None: there was none
    expected: float | None  # the same by warm-up and judge rate
    rate: float  # of verdicts after the first update, or of all where there was none
    possible: float | None  # that concurrency and latency allow
    at_once: int  # most calls under way
    updates: int
    lag: float
    gap: float  # longest time without an update after the first, the end included
    generated: int
    rejected: int
    rows: int  # answers in the journal
    verdicts: int
    lost: int


def main() -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS])
    parser.add_argument("--minutes", type=float, default=5.0, help="of each run that has no minutes of its own")
    parser.add_argument("--at-most", type=float, default=60.0, help="minutes of any run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    parser.add_argument("--out", type=Path, help="gets a line for each run")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        for row in itertools.chain(FREE, *(ROWS[name] for name in arguments.rows), FREE):
            minutes = min(arguments.at_most, row.minutes or arguments.minutes)
            outcome = carry_out(row, arguments.keep or Path(temporary), 60 * minutes, arguments.seed)
            outcomes.append(outcome)
            print(outcome, flush=True)
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.write(f"{json.dumps(asdict(outcome))}\n")
    print(table(outcomes))
    return 0


def carry_out(row: Row, folder: Path, seconds: float, seed: int) -> Outcome:
    """Make one run and measure it."""
    run = JudgedRun(folder / row.name.replace(" ", "-"))
    for path in (run.path, run.log):
        shutil.rmtree(path, ignore_errors=True)
    run.train("--seed", str(seed), *BARE, *row.arguments)
    code = run.end(seconds)
    return measured(row, run, code)


def measured(row: Row, run: JudgedRun, code: int) -> Outcome:
    """Returns what the run and the judge's log say."""
    if not run.log.is_dir():
        sys.exit(f"{row.name} made no call: see {run.output}\n{run.output.read_text()[-2000:]}")
    calls, counts, updates = run.calls(), run.counts(), run.updates()
    done = account(run.answers(), calls, spans=[(run.stopped - 0.1, float("inf"))])
    began = calls[0].began
    moments = [u["at"] for u in updates if u["at"] <= run.stopped]
    since = moments[0] if moments else began
    times = [call.ended for call in calls if call.graded and call.ended is not None]
    return Outcome(
        row=row.name,
        code=code,
        first_update=moments[0] - began if moments else None,
        expected=None if row.possible is None else WARM_UP / row.possible,
        rate=sum(since <= at <= run.stopped for at in times) / (run.stopped - since),
        possible=row.possible,
        at_once=most_at_once(calls),
        updates=len(moments),
        lag=fmean(u["lag"] for u in updates) if updates else float("nan"),
        gap=max((b - a for a, b in itertools.pairwise([*moments, run.stopped])), default=float("nan")),
        generated=counts["generated"],
        rejected=counts["rejected"],
        rows=done.rows,
        verdicts=done.verdicts,
        lost=done.lost,
    )


def most_at_once(calls: Sequence[Call]) -> int:
    """Returns the largest number of calls that were under way at one time."""
    turns = [(c.began, 1) for c in calls] + [(c.ended, -1) for c in calls if c.ended is not None]
    return max(itertools.accumulate(change for _, change in sorted(turns)), default=0)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns all rows, with rates as shares of what was possible."""
    free = fmean(o.rate for o in outcomes if o.row == "free")
    lines = [
        "| row | exit | first update, s (warm-up / judge rate) | judged/s (share of the possible) | at once | updates "
        "| lag | longest gap, s | rejected, % | verdicts | rows | lost |",
        "|---" * 12 + "|",
    ]
    for o in outcomes:
        possible = min(free, o.possible or free)
        wait = "never" if o.first_update is None else f"{o.first_update:.1f}"
        expected = "" if o.expected is None else f" ({max(o.expected, WARM_UP / free):.1f})"
        lines.append(
            f"| {o.row} | {o.code} | {wait}{expected} | {o.rate:.1f} ({o.rate / possible:.2f}) | {o.at_once} "
            f"| {o.updates} | {o.lag:.1f} | {o.gap:.1f} | {100 * o.rejected / max(1, o.generated):.2f} "
            f"| {o.verdicts:,} | {o.rows:,} | {o.lost:,} |"
        )
    by = {o.row: o for o in outcomes}
    if "tail" in by and "no tail" in by:
        tail, without = by["tail"], by["no tail"]
        updates, lag = tail.updates / max(1, without.updates), tail.lag / without.lag
        lines.append(f"\nWith stragglers {updates:.2f} of the updates without, {lag:.2f} times their lag.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
