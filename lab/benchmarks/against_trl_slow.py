"""The quickstart's sums behind a slow judge: `tba.train(...)` against TRL's GRPO, seconds to equal held-out accuracy.

    python lab/benchmarks/against_trl_slow.py [--judges 0 0.2] [--seeds 0 1 2 3 4] [--out FILE.jsonl]

Both sides get the same shipped base, problems, reward function, batch (17 prompts, eight answers each), temperature and
length, and the same judge: an exact grade after so many seconds, 256 calls at once. Held-out answers (500 problems, one
sampled answer each) are graded at once. Ours is `tba.train` of the quickstart as it is, in two processes of one thread.
TRL's GRPO runs in one process of two threads, as in `against_trl.py`, which installs it. TRL gets the best of three
rates for each judge, by seconds to the highest target that any of them reaches, on a seed that is not counted. Ours has
the quickstart's rate.

Evaluation stops TRL's clock, not ours. TRL's clock starts with its first step, ours with the first call of the judge. A
run ends at 95 %, or when its seconds are over; ours also after its 400 updates. Rows that are in `--out` are not made
again.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from against_trl import RATES, environment, run_trl
from judged_runs import JudgedRun
from when_async_pays import TARGETS, Watch, in_words, reached_at, spread

import tba
from tba.evaluation.accuracy import EvaluationSettings
from tba.evaluation.estimators import SAMPLED
from tba.recipes.quickstart import recipe as quickstart
from tba.types import Evaluation, Json
from tba_lab.judge import Judge, JudgedSums

TUNED_ON = 100  # the seed on which TRL's rate is chosen
AT_ONCE = 256
PROBLEMS = 500


@dataclass(frozen=True)
class Row:
    """One run. Seconds are None for a target that was never reached."""

    side: str
    judge: float  # seconds of a call
    rate: float
    seed: int
    seconds: tuple[float | None, ...]
    best: float

    @property
    def rank(self) -> tuple[float, ...]:
        return (*(math.inf if s is None else s for s in reversed(self.seconds)), -self.best)


def main() -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judges", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of TRL")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a run, at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    python, rows = environment(), read(options.out)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def make(side: str, judge: float, rate: float, seed: int) -> Row:
            earlier = [r for r in rows if (r.side, r.judge, r.rate, r.seed) == (side, judge, rate, seed)]
            if earlier:
                return earlier[0]
            if side == "TRL":
                delay = {"seconds": judge, "concurrency": AT_ONCE}
                limits = {"judge": delay, "stop_at": TARGETS[-1], "deadline": options.seconds}
                curve = run_trl(python, "grpo", rate, seed, 100_000, folder, **limits)["curve"]
            else:
                curve = train(judge, seed, folder, options.seconds)
            seconds = tuple(None if math.isnan(s := reached_at(curve, t)) else s for t in TARGETS)
            row = Row(side, judge, rate, seed, seconds, max(y for _, y in curve))
            print(row, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(f"{json.dumps(asdict(row))}\n")
            rows.append(row)
            return row

        best: dict[float, Row] = {}
        for judge in options.judges:
            best[judge] = min((make("TRL", judge, rate, TUNED_ON) for rate in options.rates), key=lambda row: row.rank)
        for seed in options.seeds:
            for judge in options.judges:
                make("tba", judge, quickstart.optimizer.lr, seed)
                make("TRL", judge, best[judge].rate, seed)
    print(table(rows, {judge: row.rate for judge, row in best.items()}))
    return 0


def train(judge: float, seed: int, folder: Path, most: float) -> Sequence[tuple[float, float]]:
    """Train by `tba.train`; returns accuracy by seconds."""
    run = JudgedRun(folder / f"tba-{judge:g}-{seed}")
    task = JudgedSums(digits=3, forgotten_carries=0.55, judge=Judge(seconds=judge, concurrency=AT_ONCE, log=run.log))
    evaluation = EvaluationSettings(every=20, problems=PROBLEMS, greedy=False, batch_size=PROBLEMS, logged_problems=0)
    watch = Watch(run, stands_still=False)

    stopping = False

    def stop_if(enough: bool) -> None:
        nonlocal stopping
        if enough and not stopping:
            stopping = True
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does: the run ends in order

    def examine(evaluation: Evaluation) -> None:
        stop_if(evaluation.metric == SAMPLED and evaluation.value >= TARGETS[-1])

    def look(step: Mapping[str, Json]) -> None:
        stop_if(step["wall_seconds"] - watch.zero() > most)

    tba.train(
        replace(quickstart, task=task, evaluation=evaluation),
        runs=folder,
        run_name=run.path.name,
        quiet=True,
        seed=seed,
        on_step=look,
        on_evaluation=examine,
    )
    return watch.curve()


def read(out: Path | None) -> list[Row]:
    """Returns the rows of an earlier call."""
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    return [Row(**{**values, "seconds": tuple(values["seconds"])}) for values in map(json.loads, lines)]


def table(rows: Sequence[Row], rates: Mapping[float, float]) -> str:
    """Returns means with Student's 95 % intervals over seeds."""
    targets = " | ".join(f"{t:.0%} after, s" for t in TARGETS)
    lines = [f"| judge, s | side | rate | {targets} |", "|---" * (3 + len(TARGETS)) + "|"]
    for judge, best in rates.items():
        for side, rate in (("tba", quickstart.optimizer.lr), ("TRL", best)):
            runs = [r for r in rows if (r.side, r.judge, r.rate) == (side, judge, rate) and r.seed != TUNED_ON]
            seconds = [[math.nan if s is None else s for s in r.seconds] for r in runs]
            cells = [spread([s[i] for s in seconds]) for i in range(len(TARGETS))]
            lines.append(f"| {judge:g} | {side} | {rate:g} | {' | '.join(cells)} |")
    for row in (r for r in rows if r.seed == TUNED_ON):
        tried = ", ".join(in_words(math.nan if s is None else s) for s in row.seconds)
        lines.append(f"TRL, judge {row.judge:g} s, rate {row.rate:g}, not counted: {tried} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
