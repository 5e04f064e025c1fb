"""Which form is best on a real model: SmolLM2-135M on `instruct`, forms x staleness x seeds, each at its best rate.

    tba model smollm2 --out smollm2
    python lab/benchmarks/forms.py --model smollm2 --rows forms.csv [--device cuda --at-once 6] [--seeds 3] [...]
    python lab/benchmarks/forms.py --rows forms.csv --table
    python lab/benchmarks/forms.py --task tools --forms none asymmetric decoupled --model smollm2 --rows tools.csv

A run is 90 updates of 48 answers with adapters of rank 16 in one process that alternates between a round and an update,
so that the data's age depends on the settings alone: k = 16 with half of the groups old, and k = 1 with m = 0.95.
Repeats are kept. 500 held-out prompts are answered before and after, on a GPU four times each. Everything is computed
in bfloat16. On a CPU each run has one thread, and equal seeds give equal rows; `--at-once` runs several at a time: on
an H200 twelve under MPS in 130 to 150 s, and no more in its 140 GB. A CPU without bfloat16 instructions takes six times
as long in it: add `--model.dtype float32`, and the rows have the device `cpu-float32`.

Order: at k = 16 the rates of `none`, `exact`, `asymmetric` and `lowered` are chosen among three on seed 100, which is
counted nowhere (a best rate at the edge is followed by the next beyond it), then come the counted seeds, one after the
other; the others of `TIERS` likewise; then all at k = 1, each at the rate that it had at k = 16.

`--cells asymmetric:4e-4:0 ...` makes these runs alone, form, rate and seed, at k = 16, or with `--fresh` at k = 1. The
table has each form at the rate that is best at the same k on seed 100, where one was tried, else at that of k = 16.
Forms that are in no tier are `spread-half` and `spread-one`, whose weights are between those of `none` and of
`asymmetric`, and `raft`, which keeps every answer with a reward above 0, though rewards are shares here, so that it
learns answers that fulfil half of what was asked; `raft-best` keeps the best of each group.

`--task tools` has the recipe `tools` in the place of `instruct`: 40 updates of 48 answers, in which a tool is called,
and 500 held-out products. Its rows belong in a file of their own. `--forms` leaves out the other forms of `TIERS`.

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
from tba.recipe import Recipe, RuntimeSettings
from tba.recipes.instruct import recipe as instruct
from tba.recipes.tools import recipe as tools
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
TUNING_SEED = 100  # the seed on which rates are chosen
STALE, FRESH = (16, 0.5), (1, 0.95)  # k, m
TIERS = (
    ("none", "exact", "asymmetric", "lowered"),
    ("grpo",),
    ("grpo-answer", "decoupled", "grpo-token", "tba-prime", "raft-best"),
)
RULE_FORMS = ("none", "asymmetric")  # of the second rule (lab/default_form.md): the simpler one first
RULE_SEEDS = {STALE: range(16), FRESH: range(25)}
GPU_ARGUMENTS = ("--model.device", "cuda", "--max-tokens-per-pass", "8192", "--model.generation.slots", "500",
          "--evaluation.samples", "4")  # fmt: skip
CPU_ARGUMENTS = ("--model.device", "cpu", "--model.dtype", "bfloat16")  # half of the time where a CPU multiplies in it

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
        buffer=BufferSettings(deduplicate=False),
    ),
    evaluation=EvaluationSettings(problems=500, greedy=False, batch_size=500, logged_problems=0),
    run=RuntimeSettings(checkpoint_every=0),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
)
TASKS: dict[str, Recipe] = {
    "instruct": base,
    "tools": replace(
        base,
        task=tools.task,
        model=tools.model,
        prompts=tools.prompts,
        steps=tools.steps,
        optimizer=replace(base.optimizer, schedule=tools.optimizer.schedule),
    ),
}
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
    "tba-prime": TbaPrime(_beta, loss_aggregation="row"),
    "raft": Raft(),
    "raft-best": Raft(keep="best"),
}
FORMS_OF_ROWS = (*OBJECTIVES, "earlier-push")  # the last is of before 2026-11-28: `asymmetric` with c = 1.5 g q^2
study = Study(  # for `tba train lab/benchmarks/forms.py::instruct-exact`
    name="forms",
    recipe=base,
    variants={
        f"{task}-{name}": Variant(replace(recipe, objective=objective))
        for task, recipe in TASKS.items()
        for name, objective in OBJECTIVES.items()
    },
)


@dataclass(frozen=True)
class Cell:
    """Names one run: its form, staleness, rate and seed."""

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
    """Holds the figures of one run. Accuracies are shares of 1; ess, lag and reward are means over updates."""

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
    parser.add_argument("--task", choices=list(TASKS), default="instruct")
    parser.add_argument("--forms", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--model", help="a folder, as `tba model` writes it")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", nargs="+", default=[], metavar="FORM:RATE:SEED", help="only these")
    parser.add_argument("--fresh", action="store_true", help="the cells at k = 1")
    parser.add_argument("--rule", action="store_true", help="the runs of the second rule alone")
    parser.add_argument("--folder", type=Path, help="of the runs while they are made; default: beside the rows")
    options, overrides = parser.parse_known_args()
    if options.fresh and not options.cells:
        parser.error("--fresh is of --cells: say which")
    if not options.table:
        if options.model is None:
            parser.error("--model is missing: a folder, as `tba model smollm2 --out FOLDER` writes it")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        device_arguments = GPU_ARGUMENTS if options.device == "cuda" else CPU_ARGUMENTS
        arguments = ["--model.path", options.model, *device_arguments, *overrides]
        device = options.device
        if "--model.dtype" in overrides:
            device += f"-{overrides[overrides.index('--model.dtype') + 1]}"
        folder = options.folder or options.rows.parent / "runs"
        bench = Bench(options.rows, folder, device, arguments, variant=f"{options.task}-{{}}")
        parts = [cell.split(":") for cell in options.cells]
        k, m = FRESH if options.fresh else STALE
        requested_cells = [Cell(form, k, m, float(rate), int(seed)) for form, rate, seed in parts]
        find_missing: Callable[[Sequence[Row]], list[Cell]] = partial(
            next_cells,
            seeds=range(options.seeds),
            tiers=[[form for form in tier if form in options.forms] for tier in TIERS],
        )
        if requested_cells:
            find_missing = partial(missing_cells, requested_cells)
        elif options.rule:
            find_missing = next_rule_cells
        if not bench.make_runs(options.at_once, find_missing):
            return 1
    rows = read_rows(options.rows)
    print(table(rows))
    if options.rule:
        print(rule_verdict([r for r in rows if r.seed == TUNING_SEED or _has_best_rate(r, rows)], *RULE_FORMS))
    return 0


@dataclass
class Bench:
    """Makes runs, several at a time, each in a process of its own, and keeps their rows."""

    rows: Path
    folder: Path
    device: str
    arguments: Sequence[str]  # fields of every run
    script: Path = Path(__file__).resolve()  # whose study has a variant for each form
    variant: str = "instruct-{}"  # its name, with a form put in
    row: type[Row] = Row

    def make_runs(self, at_once: int, find_missing: Callable[[Sequence[Row]], list[Cell]]) -> bool:
        """Makes the missing runs; returns whether all could be made. An exception ends those that are running."""
        running: dict[Cell, Child] = {}
        failed_cells: set[Cell] = set()
        try:
            while True:
                rows = read_rows(self.rows, self.row)
                startable_cells = [c for c in find_missing(rows) if c not in running and c not in failed_cells]
                for cell in startable_cells[: at_once - len(running)]:
                    running[cell] = self._start(cell)
                if not running:
                    return not failed_cells
                time.sleep(0.2)
                for cell, process in list(running.items()):
                    if (code := process.poll()) is None:
                        continue
                    _close_input(running.pop(cell))
                    if code:
                        failed_cells.add(cell)
                        print(f"{cell.name} failed: see {self.folder / cell.name}.log", flush=True)
                    else:
                        self._keep(cell)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
                _close_input(process)

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
            return start(Program("run", "tba.__main__", (*command, *self.arguments)), environment, log.fileno())

    def _keep(self, cell: Cell) -> None:
        run = tba.open_run(self.folder / cell.name)
        names = {f.name for f in fields(self.row)}
        values: Mapping[str, Any] = {name: value for name, value in run_figures(run).items() if name in names}
        row = self.row(**asdict(cell), **values, device=self.device, commit=_commit())
        write_rows(self.rows, [*read_rows(self.rows, self.row), row])
        print(f"{cell.name}: {row.before:.1%} -> {row.after:.1%}, ess {row.ess:.2f}, lag {row.lag:.1f}", flush=True)
        shutil.rmtree(run.path)


def run_figures(run: Run) -> dict[str, float]:
    """The figures of a run that ended; `fall` is the largest below the best accuracy so far."""
    accuracies = [e.value for e in run.evaluations if e.metric == SAMPLED]
    steps = [{name: float(x) for name, x in step.items() if isinstance(x, int | float)} for step in run.metrics()]
    means = {name: fmean(step[name] for step in steps) for name in ("ess", "lag")}
    reward = fmean(step["reward"] for step in steps[-10:])
    fall = max(best_so_far - value for best_so_far, value in zip(accumulate(accuracies, max), accuracies, strict=True))
    return {"before": accuracies[0], "after": accuracies[-1], **means, "reward": reward, "fall": fall}


def _close_input(process: Child) -> None:
    """Close our end of the input of a process that has ended."""
    if process.stdin is not None:
        process.stdin.close()


def missing_cells(requested_cells: Sequence[Cell], rows: Sequence[Row]) -> list[Cell]:
    """Returns the requested cells that have no row."""
    existing_runs = {(r.form, r.k, r.rate, r.seed) for r in rows}
    return [c for c in requested_cells if (c.form, c.k, c.rate, c.seed) not in existing_runs]


def next_cells(rows: Sequence[Row], seeds: Sequence[int], tiers: Sequence[Sequence[str]] = TIERS) -> list[Cell]:
    """Returns the runs that can be made next and have no row, in order."""
    cells: list[Cell] = []
    best_rates: dict[str, float] = {}
    for tier in tiers:
        for form in tier:
            rates, best = tuning_rates(form, rows)
            cells += [Cell(form, *STALE, rate, TUNING_SEED) for rate in rates]
            if best is not None:
                best_rates[form] = best
        cells += [Cell(form, *STALE, best_rates[form], seed) for seed in seeds for form in tier if form in best_rates]
    cells += [Cell(form, *FRESH, rate, seed) for seed in seeds for form, rate in best_rates.items()]
    return missing_cells(cells, rows)


def next_rule_cells(rows: Sequence[Row]) -> list[Cell]:
    """Returns the runs of the second rule that can be made next and have no row, in order."""
    cells: list[Cell] = []
    for (k, m), seeds in RULE_SEEDS.items():
        trials = {form: tuning_rates(form, rows, k) for form in RULE_FORMS}
        cells += [Cell(form, k, m, rate, TUNING_SEED) for form, (rates, _) in trials.items() for rate in rates]
        best_rates = {form: rate for form, (_, rate) in trials.items() if rate is not None}
        cells += [Cell(form, k, m, rate, seed) for seed in seeds for form, rate in best_rates.items()]
    return missing_cells(cells, rows)


def tuning_rates(
    form: str, rows: Sequence[Row], k: int = STALE[0], grid: Sequence[float] = RATES, factor: float = 2.0
) -> tuple[list[float], float | None]:
    """Returns the rates to try for a form, and the best rate once it has a worse one on either side.

    factor: from a best rate at the edge to the next.
    """
    accuracy_by_rate = {r.rate: r.after for r in rows if (r.form, r.k, r.seed) == (form, k, TUNING_SEED)}
    rates = sorted({*grid, *accuracy_by_rate})
    if not accuracy_by_rate.keys() >= set(rates):
        return rates, None
    best_rate = max(rates, key=lambda rate: accuracy_by_rate[rate])
    if best_rate in (rates[0], rates[-1]) and len(rates) < len(grid) + 2:
        return [*rates, float(f"{best_rate / factor if best_rate == rates[0] else best_rate * factor:g}")], None
    return rates, best_rate


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the counted runs by k and form: means with intervals, and differences paired by seed."""
    rows = [r for r in rows if r.seed == TUNING_SEED or _has_best_rate(r, rows)]
    lines = []
    for k, m in (STALE, FRESH):
        lines += [
            f"k = {k}, m = {m:g}",
            "",
            "| form | rate | seeds | after, % | worst | ESS | lag | less `none`, points | less `asymmetric` |",
            "|---" * 9 + "|",
        ]
        for form in FORMS_OF_ROWS:
            for rate in _counted_rates(rows, form, k):  # several where none was chosen
                rows_at_rate = [r for r in rows if r.form != form or r.rate == rate]
                runs = [r for r in rows_at_rate if (r.form, r.k) == (form, k) and r.seed != TUNING_SEED]
                baselines = ("none", "asymmetric")
                gains = [paired_gains(rows_at_rate, form, other, k) if form != other else [] for other in baselines]
                cells = [
                    *summary(runs),
                    f"{fmean(r.ess for r in runs):.2f}",
                    f"{fmean(r.lag for r in runs):.1f}",
                    *(format_interval(x) if x else "" for x in gains),
                ]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    for form in FORMS_OF_ROWS:
        stale_gains, fresh_gains = (paired_gains(rows, form, "none", k) for k, _ in (STALE, FRESH))
        if form != "none" and min(len(stale_gains), len(fresh_gains)) > 1:
            lines.append(f"{form} less none, both regimes alike: {pooled_by_halves(stale_gains, fresh_gains)}")
    for k, _ in (STALE, FRESH):
        if tuning := [r for r in rows if r.seed == TUNING_SEED and r.k == k]:
            lines.append(f"Rates on the seed that is not counted, k = {k}: {_tuning_text(tuning)}")
    return "\n".join(lines)


def summary(runs: Sequence[Row]) -> list[str]:
    """Cells of a table: form, rates, number of seeds, mean accuracy with its interval, and the worst seed."""
    rates = ", ".join(sorted({f"{run.rate:g}" for run in runs}))
    accuracies = [100 * run.after for run in runs]
    return [runs[0].form, rates, str(len(runs)), format_interval(accuracies), f"{min(accuracies):.1f}"]


def _has_best_rate(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row is of its form's best rate on the seed of the choice, at its own k, else at that of stale data."""
    for k in (row.k, STALE[0]):
        if accuracy_by_rate := {r.rate: r.after for r in rows if (r.form, r.k, r.seed) == (row.form, k, TUNING_SEED)}:
            return row.rate == max(sorted(accuracy_by_rate), key=lambda rate: accuracy_by_rate[rate])
    return True


def _counted_rates(rows: Sequence[Row], form: str, k: int) -> list[float]:
    """Returns the rates of a form's runs on seeds that are counted."""
    return sorted({r.rate for r in rows if (r.form, r.k) == (form, k) and r.seed != TUNING_SEED})


def paired_gains(rows: Sequence[Row], form: str, other_form: str, k: int) -> list[float]:
    """Returns by how many points a form is above another, by seed; empty where one has several rates."""
    if max(len(_counted_rates(rows, f, k)) for f in (form, other_form)) > 1:
        return []
    accuracies = {f: {r.seed: 100 * r.after for r in rows if (r.form, r.k) == (f, k)} for f in (form, other_form)}
    seeds = sorted((accuracies[form].keys() & accuracies[other_form].keys()) - {TUNING_SEED})
    return [accuracies[form][seed] - accuracies[other_form][seed] for seed in seeds]


def pooled_by_halves(stale_gains: Sequence[float], fresh_gains: Sequence[float]) -> str:
    """Returns the mean of the two regimes' means, with Welch's 95 % interval and its standard error."""
    difference = difference_of_means([-x / 2 for x in fresh_gains], [x / 2 for x in stale_gains])
    error = math.sqrt(sum(variance(x) / len(x) for x in (stale_gains, fresh_gains))) / 2
    return f"{difference.estimate:.1f} [{difference.low:.1f}, {difference.high:.1f}], standard error {error:.1f}"


def rule_verdict(rows: Sequence[Row], simpler_form: str, other_form: str) -> str:
    """Returns the second rule's verdict: pairs at k = 16 and unpaired seeds at k = 1, pooled by precision."""
    stale_gains = paired_gains(rows, other_form, simpler_form, STALE[0])
    fresh_rows = [r for r in rows if r.k == FRESH[0] and r.seed != TUNING_SEED]
    fresh_accuracies = [[100 * r.after for r in fresh_rows if r.form == form] for form in (other_form, simpler_form)]
    seeds = [len(stale_gains), *map(len, fresh_accuracies)]
    if min(seeds) < 2:
        return "The rule waits for runs: {} pairs at k = 16, {} and {} seeds at k = 1.".format(*seeds)
    leads = [fmean(stale_gains), fmean(fresh_accuracies[0]) - fmean(fresh_accuracies[1])]
    variances = [variance(stale_gains) / len(stale_gains), sum(variance(x) / len(x) for x in fresh_accuracies)]
    precision = [1 / v for v in variances]
    lead, error = sum(x * p for x, p in zip(leads, precision, strict=True)) / sum(precision), sum(precision) ** -0.5
    low, high = lead - 1.96 * error, lead + 1.96 * error
    winner = simpler_form if low <= 0 else other_form
    return (
        f"{other_form} less {simpler_form}: {leads[0]:.1f} ({variances[0] ** 0.5:.1f}) at k = 16, {leads[1]:.1f} "
        f"({variances[1] ** 0.5:.1f}) at k = 1; pooled {lead:.1f} [{low:.1f}, {high:.1f}]: {winner}"
    )


def _tuning_text(tuning: Sequence[Row]) -> str:
    return "; ".join(
        f"{form} " + ", ".join(f"{r.rate:g}: {r.after:.1%}" for r in sorted(form_rows, key=lambda r: r.rate))
        for form in FORMS_OF_ROWS
        if (form_rows := [r for r in tuning if r.form == form])
    )


def format_interval(values: Sequence[float]) -> str:
    """Returns the mean and Student's 95 % interval over seeds."""
    mean = mean_interval(values)
    return f"{mean.estimate:.1f} [{mean.low:.1f}, {mean.high:.1f}]" if len(values) > 1 else f"{mean.estimate:.1f}"


def read_rows(path: Path, row: type[Row] = Row) -> list[Row]:
    """Returns the rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    texts = {"form", "device", "commit"}
    types: Mapping[str, type] = {
        f.name: str if f.name in texts else int if f.name in ("k", "seed") else float for f in fields(row)
    }
    with path.open(newline="") as file:
        return [row(**{name: types[name](x) for name, x in line.items()}) for line in csv.DictReader(file)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    new_path = path.with_suffix(".new")
    with new_path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows({n: f"{x:.6g}" if isinstance(x, float) else x for n, x in asdict(r).items()} for r in rows)
    new_path.replace(path)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
