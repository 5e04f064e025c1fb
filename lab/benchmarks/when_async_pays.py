"""When asynchrony pays: seconds to 80, 90 and 95 % of held-out accuracy, behind judges of several speeds.

    python lab/benchmarks/when_async_pays.py --tune                    # rates and batches, on seed 100
    python lab/benchmarks/when_async_pays.py --seeds 0 1 2 3 4         # the counted runs, each side at its best
    python lab/benchmarks/when_async_pays.py --table
    python lab/benchmarks/when_async_pays.py --plot --objectives balance --judges "0 s" "0.2 s" tail

Rows go to `--rows` (lab/results/when_async_pays.csv) as runs end, and runs that are there are not repeated, so that a
command goes on where it was stopped. `--judges`, `--objectives` and `--sides` make a part of them.

The task is the quickstart's. Synchronous is the inline runtime: a round of one batch, an update, in turns (k = 1, m =
1); its evaluations stop the clock. Asynchronous is the quickstart in two processes of one thread; its searcher
evaluates, and its clock does not stop. Judges take 0, 0.2 and 4 s for an answer, and in `tail` one of 500 takes 60 s,
the others 0.2 s; 256 at once on both sides. Held-out answers are graded at once. Objectives: the default, and GRPO with
truncated importance weights by token. The rate rises for 20 updates and stays; averaged weights are evaluated; 1,000
problems, one sampled answer each, every 680 answers synchronously, every 3,400 asynchronously. Seconds count from the
first call of the judge, are linear between evaluations, and end at the first that is not below the target. A run is
stopped when it has reached 95 % or its seconds are over.

`--tune` tries all settings in RATES, GROUPS and USES for each side, objective and judge; the best has the fewest
seconds to the highest target that any setting reaches. An asynchronous setting is given up at 1.25 times the best
seconds to 95 %. A best rate or batch at an edge of the grid is reported: extend the grid by `--rates`, `--groups` and
`--uses`. The updates of a synchronous run do not depend on the judge's speed. So that side is tuned with the free judge
only, and for another judge its seconds are those plus, for each update, the seconds that the judge takes for a batch.
The asynchronous side behind `tail` has the settings that are best for it at 0.2 s.

`--at-once 2` makes two runs at a time. They share the cores: use it where the judge is nearly all of the time, or where
each run has one thread, and compare a few rows first.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
from judged_runs import JudgedRun

from tba.evaluation.accuracy import EvaluationSettings
from tba.evaluation.estimators import SAMPLED, mean_interval
from tba.objectives.correction import Correction
from tba.objectives.grpo import Grpo
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.recipe import Recipe, RuntimeSettings
from tba.recipes.quickstart import recipe as quickstart
from tba.record.evaluations import read_evaluations
from tba.record.metrics import read_last, read_metrics
from tba.record.recorder import RecordSettings
from tba.replay.pacing import Pacing
from tba.replay.selection import RecencyReward
from tba.runtime.run_directory import RunDirectory
from tba.schedules import Constant, WarmupConstant
from tba.types import Evaluation
from tba_lab.judge import Judge, JudgedSums, read_calls
from tba_lab.plot_style import COLOURS, GREY, INK, frame, save_figure
from tba_lab.study import Study, Variant

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "lab" / "results" / "when_async_pays.csv"
PLOT = ROOT / "docs" / "results" / "when_async_pays.png"
TARGETS = (0.80, 0.90, 0.95)
TUNED_ON = 100  # the seed on which rates and batches are chosen
RATES = (1e-4, 2e-4, 4e-4)
GROUPS = (8, 16, 32, 64)  # prompts of a batch, eight answers each
USES = (2.0, 8.0)  # of each answer at most, asynchronously; synchronously each is used once
AT_ONCE = 256  # calls of the judge
FREE = "0 s"  # the judge that costs nothing
TUNED_BEHIND = {"tail": "0.2 s"}  # asynchronously: both judges grade faster than the searcher generates
SIDES = ("synchronous", "asynchronous")
EVERY = {"synchronous": 680, "asynchronous": 3400}  # answers trained from one evaluation to the next
JUDGES = {  # by name: the judge, and the seconds after which a run ends
    "0 s": (Judge(concurrency=AT_ONCE), 120.0),
    "0.2 s": (Judge(seconds=0.2, concurrency=AT_ONCE), 180.0),
    "4 s": (Judge(seconds=4.0, concurrency=AT_ONCE), 900.0),
    "tail": (Judge(seconds=0.2, tail_every=500, tail_seconds=60.0, concurrency=AT_ONCE), 3600.0),
}
OBJECTIVES: dict[str, Objective] = {
    "balance": TrajectoryBalance(Constant(0.05)),
    "grpo": Grpo(Constant(0.05), correction=Correction("truncate")),
}
LABELS = {"balance": "Trajectory Balance (the default)", "grpo": "GRPO, truncated weights"}

base = replace(
    quickstart,
    task=JudgedSums(digits=3, forgotten_carries=0.55),
    optimizer=replace(quickstart.optimizer, schedule=WarmupConstant(20)),
    evaluation=EvaluationSettings(every=10, problems=1000, greedy=False, batch_size=500, logged_problems=0),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    run=RuntimeSettings(checkpoint_every=0),
    steps=1_000_000,  # until it is stopped
)


def synchronous(recipe: Recipe) -> Recipe:
    """Returns the recipe on-policy in one process: each batch is a round that the weights it updates have sampled."""
    replay = replace(recipe.replay, selection=RecencyReward(m=1.0), pacing=Pacing(warm_up=0))
    return replace(recipe, runtime="inline", sync_every=1, replay=replay)


def variant(side: str, objective: str) -> Recipe:
    recipe = replace(base, objective=OBJECTIVES[objective])
    return synchronous(recipe) if side == "synchronous" else recipe


study = Study(  # for `tba train lab/benchmarks/when_async_pays.py::synchronous-grpo`
    name="when_async_pays",
    recipe=base,
    variants={f"{s}-{o}": Variant(variant(s, o), s) for s, o in itertools.product(SIDES, OBJECTIVES)},
)


@dataclass(frozen=True)
class Cell:
    """One run."""

    side: str
    objective: str
    judge: str
    rate: float
    groups: int
    uses: float
    seed: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What has a rate and a batch that are best for it."""
        return self.side, self.objective, self.judge

    @property
    def name(self) -> str:
        judge = self.judge.replace(" ", "")
        return f"{self.side}-{self.objective}-{judge}-{self.rate:g}-{self.groups}-{self.uses:g}-{self.seed}"


@dataclass(frozen=True)
class Row(Cell):
    """What came of it. Seconds are NaN for a target that was never reached."""

    to_80: float
    to_90: float
    to_95: float
    best: float  # highest accuracy
    seconds: float  # after which it ended
    updates: int
    lag: float
    updates_to_80: float
    updates_to_90: float
    updates_to_95: float

    @property
    def reached(self) -> tuple[float, float, float]:
        return self.to_80, self.to_90, self.to_95

    def rank(self, judge: str) -> tuple[float, ...]:
        """Smaller is better behind a judge: by the seconds to the highest target, then to those below it."""
        return (*(math.inf if math.isnan(s) else s for s in reversed(self.reached_behind(judge))), -self.best)

    def reached_behind(self, judge: str) -> tuple[float, ...]:
        """Returns the seconds to each target; those of a synchronous run with the free judge are moved to another."""
        if judge == self.judge or self.side == "asynchronous":
            return self.reached
        updates = (self.updates_to_80, self.updates_to_90, self.updates_to_95)
        wait = seconds_of_batch(JUDGES[judge][0], 8 * self.groups)
        return tuple(s + u * wait for s, u in zip(self.reached, updates, strict=True))


def main() -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--plot-to", type=Path, default=PLOT)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--objectives", nargs="+", choices=[*OBJECTIVES], default=[*OBJECTIVES])
    parser.add_argument("--judges", nargs="+", choices=[*JUDGES], default=[*JUDGES])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    parser.add_argument("--uses", type=float, nargs="+", default=USES)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a run at most, if less than its judge's")
    parser.add_argument("--threads", type=int, default=1, help="of the synchronous side")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    options = parser.parse_args()
    keys = list(itertools.product(options.judges, options.objectives, options.sides))
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(
            options.rows, options.keep or Path(temporary), options.seconds, options.threads, options.keep is not None
        )
        with ThreadPoolExecutor(options.at_once) as pool:
            if options.tune:
                grid = sorted(itertools.product(options.groups, options.rates), key=from_the_middle)
                cells = [
                    Cell(side, objective, judge, rate, groups, uses, TUNED_ON)
                    for groups, rate in grid
                    for judge, objective, side in keys
                    if (side == "asynchronous" and judge not in TUNED_BEHIND) or judge == FREE
                    for uses in (options.uses if side == "asynchronous" else (1.0,))
                ]
                list(pool.map(bench.tune, cells))
            chosen = best_cells(read(options.rows))
            for key in keys if options.seeds else ():
                if (key[2], key[1], key[0]) not in chosen:
                    parser.error(f"{' '.join(key)} has no settings yet: use --tune")
            counted = [replace(chosen[s, o, j], seed=seed) for seed in options.seeds for j, o, s in keys]
            list(pool.map(bench.make, counted))
    rows = read(options.rows)
    if options.table or options.tune or options.seeds:
        print(table(rows))
    if options.plot:
        shown_rows = [r for r in rows if r.objective in options.objectives]
        print(plot(shown_rows, options.judges, options.plot_to))
    return 0


@dataclass
class Bench:
    """Makes runs and keeps their rows."""

    rows: Path
    folder: Path
    seconds: float
    threads: int
    keep: bool

    def tune(self, cell: Cell) -> None:
        """Make a run to choose by; an asynchronous one is given up where it cannot be the best."""
        tried = [r for r in read(self.rows) if (*r.key, r.seed) == (*cell.key, TUNED_ON)]
        fastest = min((r.to_95 for r in tried if not math.isnan(r.to_95)), default=math.inf)
        self.make(cell, 1.25 * fastest if cell.side == "asynchronous" else math.inf)

    def make(self, cell: Cell, seconds: float = math.inf) -> None:
        """Make a run, unless its row is there."""
        if any(cell_of(r) == cell for r in read(self.rows)):
            return
        run = JudgedRun(self.folder / cell.name)
        for path in (run.path, run.log):
            shutil.rmtree(path, ignore_errors=True)
        most = min(seconds, self.seconds, JUDGES[cell.judge][1])
        run.train(*arguments(cell, self.threads), recipe=f"{Path(__file__).resolve()}::{cell.side}-{cell.objective}")
        watch = Watch(run, cell.side == "synchronous")
        code = run.end(6 * most + 120, lambda: watch.seconds() > most or watch.reached(TARGETS[-1]), look=1.0)
        if code not in (0, 130):
            sys.exit(f"{cell.name} ended with {code}: see {run.output}\n{run.output.read_text()[-2000:]}")
        row = watch.row(cell)
        append(self.rows, row)
        print(f"{cell.name}: {', '.join(map(in_words, row.reached))} s, best {row.best:.1%}, {row.updates} updates, "
              f"lag {row.lag:.1f}, {row.seconds:.0f} s", flush=True)  # fmt: skip
        if not self.keep:
            shutil.rmtree(run.path)
            shutil.rmtree(run.log)


def arguments(cell: Cell, threads: int) -> list[str]:
    """Returns the fields of a run."""
    judge, _ = JUDGES[cell.judge]
    words = ["--seed", str(cell.seed), "--optimizer.lr", f"{cell.rate:g}", "--groups-per-step", str(cell.groups)]
    for f in fields(judge):
        if f.name not in ("log", "coroutine"):
            words += [f"--task.judge.{f.name.replace('_', '-')}", f"{getattr(judge, f.name):g}"]
    words += ["--evaluation.every", str(max(1, round(EVERY[cell.side] / (8 * cell.groups))))]
    if cell.side == "synchronous":
        words += ["--prompts-per-round", str(cell.groups), "--run.threads", str(threads)]
    else:
        words += ["--replay.pacing.max-mean-uses", f"{cell.uses:g}"]
    return words


@dataclass
class Watch:
    """Reads a run's held-out accuracy while it goes on; its zero is the first call of the judge."""

    run: JudgedRun
    stands_still: bool  # the clock, while the run evaluates
    began: float | None = None  # of the first call, in seconds of the run

    def evaluations(self) -> list[Evaluation]:
        figures = read_evaluations(self.run.path) if self.run.path.exists() else []
        return [e for e in figures if e.metric == SAMPLED]

    def seconds(self) -> float:
        """Returns how long it has been learning, as far as it has written."""
        last = read_last(self.run.path) if self.run.path.exists() else None
        return last["wall_seconds"] - self.zero() if last else 0.0

    def zero(self) -> float:
        """Returns the seconds of the run at the first call."""
        if self.began is None:
            clock = RunDirectory.open(self.run.path).facts["clock"]
            before = sum(e.seconds for e in self.evaluations() if e.version.step == 0) if self.stands_still else 0.0
            self.began = read_calls(self.run.log)[0].began - clock["began"] - before
        return self.began

    def curve(self) -> list[tuple[float, float]]:
        """Returns accuracy by seconds."""
        return [(max(0.0, e.wall_seconds - self.zero()), e.value) for e in self.evaluations()]

    def curve_by_updates(self) -> list[tuple[float, float]]:
        return [(e.version.step, e.value) for e in self.evaluations()]

    def reached(self, target: float) -> bool:
        return any(e.value >= target for e in self.evaluations())

    def row(self, cell: Cell) -> Row:
        curve, metrics = self.curve(), read_metrics(self.run.path)
        to_80, to_90, to_95 = (reached_at(curve, target) for target in TARGETS)
        updates_to_80, updates_to_90, updates_to_95 = (reached_at(self.curve_by_updates(), t) for t in TARGETS)
        return Row(
            **asdict(cell),
            to_80=to_80,
            to_90=to_90,
            to_95=to_95,
            best=max(y for _, y in curve),
            seconds=self.seconds(),
            updates=len(metrics),
            lag=fmean(m["lag"] for m in metrics) if metrics else math.nan,
            updates_to_80=updates_to_80,
            updates_to_90=updates_to_90,
            updates_to_95=updates_to_95,
        )


def seconds_of_batch(judge: Judge, answers: int) -> float:
    """Returns the seconds that a judge takes for a batch, in the mean."""
    slow = 1 - (1 - 1 / judge.tail_every) ** answers if judge.tail_every else 0.0
    return math.ceil(answers / judge.concurrency) * judge.seconds + slow * judge.tail_seconds


def reached_at(curve: Sequence[tuple[float, float]], target: float) -> float:
    """Returns the seconds or updates to a target, linear between evaluations; NaN: never."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y1 >= target:
            return x0 + (x1 - x0) * max(0.0, target - y0) / max(y1 - y0, 1e-9)
    return math.nan


def from_the_middle(pair: tuple[int, float]) -> float:
    """Returns how far from the likely best a batch and a rate are: what is tried later is given up sooner."""
    return abs(math.log(pair[0] / 32)) + abs(math.log(pair[1] / 2e-4))


def cell_of(row: Row) -> Cell:
    return Cell(**{f.name: getattr(row, f.name) for f in fields(Cell)})


def best_cells(rows: Sequence[Row]) -> dict[tuple[str, str, str], Cell]:
    """Returns the best setting of each side, objective and judge."""
    best = {}
    for side, objective, judge in itertools.product(SIDES, OBJECTIVES, JUDGES):
        if runs := tuned(rows, side, objective, judge):
            fastest = cell_of(min(runs, key=lambda row: row.rank(judge)))
            best[side, objective, judge] = replace(fastest, judge=judge)
    return best


def tuned(rows: Sequence[Row], side: str, objective: str, judge: str) -> list[Row]:
    """Returns the runs by which a setting is chosen."""
    key = (side, objective, FREE if side == "synchronous" else TUNED_BEHIND.get(judge, judge))
    return [r for r in rows if r.seed == TUNED_ON and r.key == key]


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if it is not there."""
    if not path.exists():
        return []
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
    with path.open(newline="") as file:
        return [Row(**{f.name: kinds[str(f.type)](line[f.name]) for f in fields(Row)}) for line in csv.DictReader(file)]


def append(path: Path, row: Row) -> None:
    """Write a row more."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow([f.name for f in fields(Row)])
        writer.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in astuple(row)])


def counted(rows: Sequence[Row], judge: str, objective: str, side: str) -> list[Row]:
    """Returns the counted runs at the best rate and batch, by seed."""
    best = best_cells(rows).get((side, objective, judge))
    runs = [r for r in rows if best is not None and cell_of(r) == replace(best, seed=r.seed) and r.seed != TUNED_ON]
    return sorted(runs, key=lambda r: r.seed)


def table(rows: Sequence[Row]) -> str:
    """Returns means with Student's 95 % intervals, ratios paired by seed, and the rates and batches that were tried."""
    lines = ["| judge | objective | target | synchronous, s | asynchronous, s | synchronous / asynchronous |"]
    lines.append("|---" * 6 + "|")
    for judge, objective in itertools.product(JUDGES, OBJECTIVES):
        sides = [counted(rows, judge, objective, side) for side in SIDES]
        for i, target in enumerate(TARGETS if any(sides) else ()):
            cells = [spread([r.reached[i] for r in side]) for side in sides]
            ratio = ratios(sides[0], sides[1], i)
            lines.append(f"| {judge} | {LABELS[objective]} | {target:.0%} | {' | '.join(cells)} | {ratio} |")
    lines += [
        "",
        "Rate x prompts of a batch x uses, on a seed that is not counted: seconds to 80, 90, 95 % (best in bold)",
        "",
    ]
    for key, best in best_cells(rows).items():
        runs = tuned(rows, *key)
        edge = [name for name in ("rate", "groups") if len(values := {getattr(r, name) for r in runs}) > 1
                and getattr(best, name) in (min(values), max(values))]  # fmt: skip
        texts = []
        for row in sorted(runs, key=lambda r: (r.groups, r.rate, r.uses)):
            bold = "**" if replace(cell_of(row), judge=key[2]) == best else ""
            reached = ", ".join(map(in_words, row.reached_behind(key[2])))
            texts.append(f"{bold}{row.rate:g} x {row.groups} x {row.uses:g}: {reached}{bold}")
        tried = "; ".join(texts)
        lines.append(f"- {' '.join(key)}: {tried}{f' (at an edge: {edge})' if edge else ''}")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Returns the mean, its interval and the worst of what was reached, and how many runs never did."""
    numbers = [v for v in values if not math.isnan(v)]
    never = f", never in {len(values) - len(numbers)} of {len(values)}" if len(numbers) < len(values) else ""
    if not numbers:
        return f"never in {len(values)} of {len(values)}" if values else "not measured"
    interval = mean_interval(numbers)
    between = f" [{interval.low:.1f}, {interval.high:.1f}], worst {max(numbers):.1f}" if len(numbers) > 1 else ""
    return f"{interval.estimate:.1f}{between}{never}"


def ratios(synchronous: Sequence[Row], asynchronous: Sequence[Row], i: int) -> str:
    """Returns the geometric mean of the ratios by seed, with the interval of its logarithm."""
    seconds = {r.seed: r.reached[i] for r in asynchronous}
    pairs = [r.reached[i] / seconds[r.seed] for r in synchronous if r.seed in seconds]
    numbers = [x for x in pairs if not math.isnan(x)]
    if not numbers:
        return ""
    interval = mean_interval(np.log(numbers))
    between = f" [{math.exp(interval.low):.2f}, {math.exp(interval.high):.2f}]" if len(numbers) > 1 else ""
    count = f" ({len(numbers)} of {len(pairs)} seeds)" if len(numbers) < len(pairs) else ""
    return f"{geometric_mean(numbers):.2f}{between}{count}"


def plot(rows: Sequence[Row], judges: Sequence[str], path: Path) -> Path:
    """Draw seconds to each target by judge, a panel for each target and each objective that has both sides."""
    from matplotlib.figure import Figure  # a second to load
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11.0, 6.8), facecolor="white", layout="constrained")
    both = [o for o in OBJECTIVES if any(counted(rows, judge, o, "asynchronous") for judge in judges)]
    figure.set_figheight(3.4 * len(both))
    grid = figure.subplots(len(both), len(TARGETS), squeeze=False, sharex=True, sharey=True)
    for (n, objective), (i, target) in itertools.product(enumerate(both), enumerate(TARGETS)):
        axes = grid[n][i]
        frame(axes, f"{target:.0%}: {LABELS[objective]}", "seconds, each seed, mean and 95 % interval")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        for s, side in enumerate(SIDES):
            for x, judge in enumerate(judges):
                points = [r.reached[i] for r in counted(rows, judge, objective, side)]
                draw(axes, x + (s - 0.5) * 0.3, points, COLOURS[1 - s])
        axes.set_xticks(range(len(judges)), judges)
        axes.set_xlim(-0.6, len(judges) - 0.4)
        axes.set_xlabel("judge of an answer", color=GREY, fontsize=9)
    for s, side in enumerate(SIDES):
        grid[0][0].plot([], [], "o", ms=6, color=COLOURS[1 - s], label=side)
    grid[0][0].legend(frameon=False, fontsize=8, labelcolor=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    return save_figure(figure, path)


def draw(axes: Any, x: float, points: Sequence[float], colour: str) -> None:
    """Draw the runs of one side; a cross at the top stands for those that never got there."""
    numbers = [p for p in points if not math.isnan(p)]
    axes.plot([x] * len(numbers), numbers, "o", ms=3, color=colour, alpha=0.35)
    if numbers:
        interval = mean_interval(numbers)
        low = max(interval.low, min(numbers) / 2)  # an interval may reach below 0, which this axis lacks
        error = [[interval.estimate - low], [interval.high - interval.estimate]] if len(numbers) > 1 else None
        axes.errorbar([x], [interval.estimate], error, fmt="o", ms=6, color=colour, capsize=3)
    if len(numbers) < len(points):
        axes.plot([x], [0.97], "x", transform=axes.get_xaxis_transform(), color=colour)


def in_words(seconds: float) -> str:
    return "never" if math.isnan(seconds) else f"{seconds:.1f}"


if __name__ == "__main__":
    sys.exit(main())
