"""Which form is best on a real model: SmolLM2-135M on `instruct`, forms x staleness x seeds, each at its best rate.

    tba model smollm2 --out smollm2
    python lab/benchmarks/forms.py --model smollm2 --rows forms.csv [--device cuda --at-once 6] [--seeds 3] [...]
    python lab/benchmarks/forms.py --rows forms.csv --table

A run is 90 updates of 48 answers with adapters of rank 16 in one process that alternates between a round and an update,
so that the data's age depends on the settings alone: k = 16 with half of the groups old, and k = 1 with m = 0.95.
Repeats are kept. 500 held-out prompts are answered before and after, on a GPU four times each. Everything is computed
in bfloat16. On a CPU each run has one thread, and equal seeds give equal rows; `--at-once` runs several at a time: on
an H200 twelve under MPS in 130 to 150 s, and no more in its 140 GB.

Order: at k = 16 the rates of `none`, `exact`, `asymmetric` and `lowered` are chosen among three on seed 100, which is
counted nowhere (a best rate at the edge is followed by the next beyond it), then come the counted seeds, one after the
other; the others of `TIERS` likewise; then all at k = 1, each at the rate that it had at k = 16.

`--cells asymmetric:4e-4:0 ...` makes these runs alone, form, rate and seed, at k = 16, or with `--fresh` at k = 1. The
table has each form at the rate that is best at the same k on seed 100, where one was tried, else at that of k = 16.
Forms that are in no tier are `spread-half` and `spread-one`, whose weights are between those of `none` and of
`asymmetric`, and `raft`, which keeps every answer with a reward above 0, though rewards are shares here, so that it
learns answers that fulfil half of what was asked; `raft-best` keeps the best of each group.

`--rule` makes the runs of the second rule of lab/default_form.md (on an H200 some 50 minutes) and prints what it says:
rates at each age on seed 100, 16 pairs at k = 16, 25 seeds of each form at k = 1.

`grpo` is bare, clipped by token; `grpo-token` and `grpo-answer` have weights truncated at 8 in its place, `decoupled`
has decoupled PPO (`Correction`).

Every run that ends is a row; the file is written beside and renamed. The same command goes on after a stop: runs that
were cut off are made again. The table has each form at its best rate, Student's 95 % intervals over seeds, and
differences paired by seed.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import tba
from tba.api import Run
from tba.evaluation.accuracy import EvaluationSettings
from tba.evaluation.estimators import SAMPLED, mean_interval
from tba.objectives.correction import Correction
from tba.objectives.grpo import Grpo
from tba.objectives.raft import Raft
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.recipe import RuntimeSettings
from tba.recipes.instruct import recipe as instruct
from tba.record.recorder import RecordSettings
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.runtime.local.forkserver import Child, Program, start
from tba.schedules import Constant, WarmupStableDecay
from tba.tasks.instruct import Instruct
from tba.training.optimizer import OptimizerSettings
from tba_lab.intervals import difference_of_means
from tba_lab.study import Study, Variant
from tba_lab.tb_forms import LeastVarianceBalance, SpreadBalance, lowered

RATES = (1e-4, 2e-4, 4e-4)
TUNED_ON = 100  # the seed on which rates are chosen
STALE, FRESH = (16, 0.5), (1, 0.95)  # k, m
TIERS = (
    ("none", "exact", "asymmetric", "lowered"),
    ("grpo",),
    ("grpo-answer", "decoupled", "grpo-token", "tba-prime", "raft-best"),
)
RULE = ("none", "least-variance")  # of the second rule (lab/default_form.md): the simpler one first
RULE_SEEDS = {STALE: range(16), FRESH: range(25)}
ON_GPU = ("--model.device", "cuda", "--max-tokens-per-pass", "8192", "--model.generation.slots", "500",
          "--evaluation.samples", "4")  # fmt: skip
ON_CPU = ("--model.device", "cpu", "--model.dtype", "bfloat16")  # half of the time where a CPU multiplies in it

_beta = Constant(0.02)
base = replace(
    instruct,
    task=Instruct(eval_problems=500),
    runtime="inline",
    steps=90,
    groups_per_step=6,
    prompts_per_round=6,
    optimizer=OptimizerSettings(schedule=WarmupStableDecay(5, 60, 25, final=0.1)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.5),
        pacing=Pacing(warm_up=0, max_mean_uses=1.0),
        buffer=BufferSettings(distinct=False),
    ),
    evaluation=EvaluationSettings(problems=500, greedy=False, chunk=500, shown=0),
    run=RuntimeSettings(checkpoint_every=0),
    record=RecordSettings(tensorboard=False, samples=0),
)
OBJECTIVES: dict[str, Objective] = {
    "none": TrajectoryBalance(_beta, off_policy="none"),
    "exact": TrajectoryBalance(_beta, off_policy="exact"),
    "asymmetric": TrajectoryBalance(_beta, off_policy="asymmetric"),
    "least-variance": LeastVarianceBalance(_beta, off_policy="exact"),
    "least-variance-ones": LeastVarianceBalance(_beta, off_policy="none"),
    "lowered": lowered(_beta),
    "spread-half": SpreadBalance(_beta, spread=0.5),
    "spread-one": SpreadBalance(_beta, spread=1.0),
    "grpo": Grpo(_beta),
    "grpo-token": Grpo(_beta, correction=Correction("truncate", "token")),
    "grpo-answer": Grpo(_beta, correction=Correction("truncate", "sequence")),
    "decoupled": Grpo(_beta, correction=Correction("decoupled")),
    "tba-prime": TbaPrime(_beta, per="row"),
    "raft": Raft(),
    "raft-best": Raft(keep="best"),
}
study = Study(  # for `tba train lab/benchmarks/forms.py::exact`
    name="forms",
    recipe=base,
    variants={name: Variant(replace(base, objective=objective)) for name, objective in OBJECTIVES.items()},
)


@dataclass(frozen=True)
class Cell:
    """One run."""

    form: str
    k: int
    m: float
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.form}-k{self.k}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class Row(Cell):
    """What came of it. Shares of 1; ess, lag and reward are means over updates."""

    before: float
    after: float
    ess: float
    lag: float
    reward: float  # of the last ten updates
    device: str
    commit: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--model", help="a folder, as `tba model` writes it")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", nargs="+", default=[], metavar="FORM:RATE:SEED", help="only these")
    parser.add_argument("--fresh", action="store_true", help="the cells at k = 1")
    parser.add_argument("--rule", action="store_true", help="the runs of the second rule alone")
    parser.add_argument("--folder", type=Path, help="of the runs while they are made; default: beside the rows")
    given, overrides = parser.parse_known_args()
    if given.fresh and not given.cells:
        parser.error("--fresh is of --cells: say which")
    if not given.table:
        if given.model is None:
            parser.error("--model is missing: a folder, as `tba model smollm2 --out FOLDER` writes it")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        fixed = ["--model.path", given.model, *(ON_GPU if given.device == "cuda" else ON_CPU), *overrides]
        bench = Bench(given.rows, given.folder or given.rows.parent / "runs", given.device, fixed)
        parts = [cell.split(":") for cell in given.cells]
        asked = [Cell(form, *(FRESH if given.fresh else STALE), float(rate), int(seed)) for form, rate, seed in parts]
        missing_cells: Callable[[Sequence[Row]], list[Cell]] = partial(wanted, seeds=range(given.seeds))
        if asked:
            missing_cells = partial(left, asked)
        elif given.rule:
            missing_cells = wanted_by_rule
        if not bench.go(given.at_once, missing_cells):
            return 1
    rows = read(given.rows)
    print(table(rows))
    if given.rule:
        print(pooled([r for r in rows if r.seed == TUNED_ON or _at_its_rate(r, rows)], *RULE))
    return 0


@dataclass
class Bench:
    """Makes runs, several at a time, each in a process of its own, and keeps their rows."""

    rows: Path
    folder: Path
    device: str
    fixed: Sequence[str]  # fields of every run
    script: Path = Path(__file__).resolve()  # whose study has a variant for each form
    variant: str = "{}"  # its name, with a form put in
    row: type[Row] = Row

    def go(self, at_once: int, missing: Callable[[Sequence[Row]], list[Cell]]) -> bool:
        """Make what is missing beside the rows; whether all could be made. What is running is ended by an exception."""
        running: dict[Cell, Child] = {}
        failed: set[Cell] = set()
        try:
            while True:
                done = read(self.rows, self.row)
                ready = [c for c in missing(done) if c not in running and c not in failed]
                for cell in ready[: at_once - len(running)]:
                    running[cell] = self._start(cell)
                if not running:
                    return not failed
                time.sleep(0.2)
                for cell, process in list(running.items()):
                    if (code := process.poll()) is None:
                        continue
                    _let_go(running.pop(cell))
                    if code:
                        failed.add(cell)
                        print(f"{cell.name} failed: see {self.folder / cell.name}.log", flush=True)
                    else:
                        self._keep(cell)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
                _let_go(process)

    def _start(self, cell: Cell) -> Child:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / cell.name, ignore_errors=True)
        command = ["train", f"{self.script}::{self.variant.format(cell.form)}"]
        command += ["--runs", str(self.folder), "--run-name", cell.name, "--seed", str(cell.seed)]
        command += [
            "--sync-every",
            str(cell.k),
            "--replay.selection.m",
            str(cell.m),
            "--optimizer.lr",
            f"{cell.rate:g}",
        ]
        with (self.folder / f"{cell.name}.log").open("wb") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return start(Program("run", "tba.__main__", (*command, *self.fixed)), environment, log.fileno())

    def _keep(self, cell: Cell) -> None:
        run = tba.open_run(self.folder / cell.name)
        names = {f.name for f in fields(self.row)}
        values: Mapping[str, Any] = {name: value for name, value in measured(run).items() if name in names}
        row = self.row(**asdict(cell), **values, device=self.device, commit=_commit())
        write(self.rows, [*read(self.rows, self.row), row])
        print(f"{cell.name}: {row.before:.1%} -> {row.after:.1%}, ess {row.ess:.2f}, lag {row.lag:.1f}", flush=True)
        shutil.rmtree(run.path)


def measured(run: Run) -> dict[str, float]:
    """The figures of a run that ended; `fall` is the largest below the best accuracy so far."""
    sampled = [e.value for e in run.evaluations if e.metric == SAMPLED]
    steps = [{name: float(x) for name, x in step.items() if isinstance(x, int | float)} for step in run.metrics()]
    means = {name: fmean(step[name] for step in steps) for name in ("ess", "lag")}
    reward = fmean(step["reward"] for step in steps[-10:])
    fall = max(best - value for best, value in zip(accumulate(sampled, max), sampled, strict=True))
    return {"before": sampled[0], "after": sampled[-1], **means, "reward": reward, "fall": fall}


def _let_go(process: Child) -> None:
    """Close our end of the input of a process that has ended."""
    if process.stdin is not None:
        process.stdin.close()


def left(asked: Sequence[Cell], done: Sequence[Row]) -> list[Cell]:
    """The runs of these that are not there."""
    there = {(r.form, r.k, r.rate, r.seed) for r in done}
    return [c for c in asked if (c.form, c.k, c.rate, c.seed) not in there]


def wanted(done: Sequence[Row], seeds: Sequence[int]) -> list[Cell]:
    """The runs that can be made next and are not there, in order."""
    cells: list[Cell] = []
    chosen: dict[str, float] = {}
    for tier in TIERS:
        for form in tier:
            rates, best = tried(form, done)
            cells += [Cell(form, *STALE, rate, TUNED_ON) for rate in rates]
            if best is not None:
                chosen[form] = best
        cells += [Cell(form, *STALE, chosen[form], seed) for seed in seeds for form in tier if form in chosen]
    cells += [Cell(form, *FRESH, rate, seed) for seed in seeds for form, rate in chosen.items()]
    return left(cells, done)


def wanted_by_rule(done: Sequence[Row]) -> list[Cell]:
    """The runs of the second rule that can be made next and are not there, in order."""
    cells: list[Cell] = []
    for (k, m), seeds in RULE_SEEDS.items():
        trials = {form: tried(form, done, k) for form in RULE}
        cells += [Cell(form, k, m, rate, TUNED_ON) for form, (rates, _) in trials.items() for rate in rates]
        best = {form: rate for form, (_, rate) in trials.items() if rate is not None}
        cells += [Cell(form, k, m, rate, seed) for seed in seeds for form, rate in best.items()]
    return left(cells, done)


def tried(
    form: str, done: Sequence[Row], k: int = STALE[0], grid: Sequence[float] = RATES, factor: float = 2.0
) -> tuple[list[float], float | None]:
    """The rates to try for a form, and the best one once it is known: one that has a worse one on either side.

    factor: from a best rate at the edge to the next.
    """
    after = {r.rate: r.after for r in done if (r.form, r.k, r.seed) == (form, k, TUNED_ON)}
    rates = sorted({*grid, *after})
    if not after.keys() >= set(rates):
        return rates, None
    best = max(rates, key=lambda rate: after[rate])
    if best in (rates[0], rates[-1]) and len(rates) < len(grid) + 2:
        return [*rates, float(f"{best / factor if best == rates[0] else best * factor:g}")], None
    return rates, best


def table(rows: Sequence[Row]) -> str:
    """The counted runs by k and form: means with intervals, and differences paired by seed."""
    rows = [r for r in rows if r.seed == TUNED_ON or _at_its_rate(r, rows)]
    lines = []
    for k, m in (STALE, FRESH):
        lines += [
            f"k = {k}, m = {m:g}",
            "",
            "| form | rate | seeds | after, % | worst | ESS | lag | less `none`, points | less `asymmetric` |",
            "|---" * 9 + "|",
        ]
        for form in OBJECTIVES:
            runs = [r for r in rows if (r.form, r.k) == (form, k) and r.seed != TUNED_ON]
            if not runs:
                continue
            gained = [paired(rows, form, other, k) if form != other else [] for other in ("none", "asymmetric")]
            cells = [
                *summary(runs),
                f"{fmean(r.ess for r in runs):.2f}",
                f"{fmean(r.lag for r in runs):.1f}",
                *(interval(x) if x else "" for x in gained),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    for form in OBJECTIVES:
        stale, fresh = (paired(rows, form, "none", k) for k, _ in (STALE, FRESH))
        if form != "none" and min(len(stale), len(fresh)) > 1:
            lines.append(f"{form} less none, both regimes alike: {joined(stale, fresh)}")
    for k, _ in (STALE, FRESH):
        if tuning := [r for r in rows if r.seed == TUNED_ON and r.k == k]:
            lines.append(f"Rates on the seed that is not counted, k = {k}: {_of_rates(tuning)}")
    return "\n".join(lines)


def summary(runs: Sequence[Row]) -> list[str]:
    """Cells of a table: form, rates, number of seeds, mean accuracy with its interval, and the worst seed."""
    rates = ", ".join(sorted({f"{run.rate:g}" for run in runs}))
    after = [100 * run.after for run in runs]
    return [runs[0].form, rates, str(len(runs)), interval(after), f"{min(after):.1f}"]


def _at_its_rate(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row is of its form's best rate on the seed of the choice, at its own k, else at that of stale data."""
    for k in (row.k, STALE[0]):
        if after := {r.rate: r.after for r in rows if (r.form, r.k, r.seed) == (row.form, k, TUNED_ON)}:
            return row.rate == max(sorted(after), key=lambda rate: after[rate])
    return True


def paired(rows: Sequence[Row], form: str, other: str, k: int) -> list[float]:
    """What a form has above another in points, by seed."""
    after = {f: {r.seed: 100 * r.after for r in rows if (r.form, r.k) == (f, k)} for f in (form, other)}
    return [x - after[other][s] for s, x in sorted(after[form].items()) if s in after[other] and s != TUNED_ON]


def joined(stale: Sequence[float], fresh: Sequence[float]) -> str:
    """The mean of the two regimes' means, with Welch's 95 % interval and its standard error."""
    found = difference_of_means([-x / 2 for x in fresh], [x / 2 for x in stale])
    error = math.sqrt(sum(variance(x) / len(x) for x in (stale, fresh))) / 2
    return f"{found.estimate:.1f} [{found.low:.1f}, {found.high:.1f}], standard error {error:.1f}"


def pooled(rows: Sequence[Row], simpler: str, other: str) -> str:
    """What the second rule says: pairs at k = 16 and unpaired seeds at k = 1, pooled by precision, in points."""
    stale = paired(rows, other, simpler, STALE[0])
    counted = [r for r in rows if r.k == FRESH[0] and r.seed != TUNED_ON]
    fresh = [[100 * r.after for r in counted if r.form == form] for form in (other, simpler)]
    seeds = [len(stale), *map(len, fresh)]
    if min(seeds) < 2:
        return "The rule waits for runs: {} pairs at k = 16, {} and {} seeds at k = 1.".format(*seeds)
    leads = [fmean(stale), fmean(fresh[0]) - fmean(fresh[1])]
    variances = [variance(stale) / len(stale), sum(variance(x) / len(x) for x in fresh)]
    precision = [1 / v for v in variances]
    lead, error = sum(x * p for x, p in zip(leads, precision, strict=True)) / sum(precision), sum(precision) ** -0.5
    low, high = lead - 1.96 * error, lead + 1.96 * error
    winner = simpler if low <= 0 else other
    return (
        f"{other} less {simpler}: {leads[0]:.1f} ({variances[0] ** 0.5:.1f}) at k = 16, {leads[1]:.1f} "
        f"({variances[1] ** 0.5:.1f}) at k = 1; pooled {lead:.1f} [{low:.1f}, {high:.1f}]: {winner}"
    )


def _of_rates(tuning: Sequence[Row]) -> str:
    return "; ".join(
        f"{form} " + ", ".join(f"{r.rate:g}: {r.after:.1%}" for r in sorted(own, key=lambda r: r.rate))
        for form in OBJECTIVES
        if (own := [r for r in tuning if r.form == form])
    )


def interval(values: Sequence[float]) -> str:
    """Mean and Student's 95 % interval over seeds."""
    found = mean_interval(values)
    return f"{found.estimate:.1f} [{found.low:.1f}, {found.high:.1f}]" if len(values) > 1 else f"{found.estimate:.1f}"


def read(path: Path, row: type[Row] = Row) -> list[Row]:
    """The rows of a file; none if it is not there."""
    if not path.exists():
        return []
    texts = {"form", "device", "commit"}
    types: Mapping[str, type] = {
        f.name: str if f.name in texts else int if f.name in ("k", "seed") else float for f in fields(row)
    }
    with path.open(newline="") as file:
        return [row(**{name: types[name](x) for name, x in line.items()}) for line in csv.DictReader(file)]


def write(path: Path, rows: Sequence[Row]) -> None:
    beside = path.with_suffix(".new")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows({n: f"{x:.6g}" if isinstance(x, float) else x for n, x in asdict(r).items()} for r in rows)
    beside.replace(path)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
