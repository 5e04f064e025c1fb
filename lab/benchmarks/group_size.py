"""Makes the runs of the study `group_size` in order: the rate of each cell on a seed that is not counted, then seeds.

    python lab/benchmarks/group_size.py [--tasks sums countdown] [--seeds 0,1,2] [--field value ...]
    tba model smollm2 --out smollm2
    python lab/benchmarks/group_size.py --tasks instruct --model.path smollm2 --model.dtype bfloat16
    python lab/benchmarks/group_size.py --table

A cell is a task, a group size and an age of the data. On seed 100 the middle three of its five rates are tried; a best
one at the edge is followed by the next beyond it. Then come the counted seeds, one after the other, at the best rates.
Each run is a row of `--rows` as soon as it has ended, and is not made again where its row is. `--field value` is set in
every run, which then needs another folder and other rows. `--sizes 4 8 20` are these group sizes alone, `--ages k10` is
this age alone.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tba.evaluation.estimators import SAMPLED, mean_interval
from tba_lab.command import StudyOptions, run_study
from tba_lab.studies.group_size import COMPARISONS, name_of
from tba_lab.trial import Trial, run_in_child

TUNED_ON = 100  # the seed on which rates are chosen
ROWS = Path(__file__).parents[1] / "results" / "group_size.csv"
Row = Mapping[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(COMPARISONS), default=["sums", "countdown"])
    parser.add_argument("--seeds", default="0,1,2", help="those that are counted")
    parser.add_argument("--sizes", type=int, nargs="+", help="group sizes to make runs of; default: all")
    parser.add_argument("--ages", nargs="+", choices=["sync", "k10"], default=["sync", "k10"])
    parser.add_argument("--out", type=Path, default=Path("studies/group_size"), help="the study's folder")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    options, fields = parser.parse_known_args()
    if not options.table:
        for task in options.tasks:
            cells = [cell for cell in cells_of(task) if cell[2] in options.ages]
            cells = [cell for cell in cells if options.sizes is None or cell[1] in options.sizes]
            while variants := [v for cell in cells for v in untried(*cell, read(options.rows))]:
                if code := make(variants, str(TUNED_ON), options.out, options.rows, fields):
                    return code
            chosen = [name_of(*cell, rate) for cell in cells if (rate := best(*cell, read(options.rows)))]
            for seed in options.seeds.split(","):
                finished_variants = {row["variant"] for row in read(options.rows) if row["seed"] == seed}
                variants = [name for name in chosen if name not in finished_variants]
                if variants and (code := make(variants, seed, options.out, options.rows, fields)):
                    return code
    print(table(read(options.rows)))
    return 0


def make(variants: Sequence[str], seeds: str, out: Path, rows: Path, fields: Sequence[str]) -> int:
    """Make these runs, and have each as a row once it has ended; returns the study's exit code, 1 where one failed."""
    options = StudyOptions(seeds=seeds, only=",".join(variants), out=out)

    def and_keep(trial: Trial, stop: Callable[[], bool]) -> int:
        keep(out, rows)  # the run before this one is in the study's table now
        return run_in_child(trial, stop)

    code = run_study("group_size", options, fields, and_keep)
    keep(out, rows)
    return code or int(any(row["variant"] in variants and row["failure"] for row in read(rows)))


def keep(out: Path, rows: Path) -> None:
    """Add the study's rows, if there are some yet, to those of runs that its folder does not have."""
    if (table := out / "runs.csv").exists():
        study_rows = read(table)
        trials = {(row["variant"], row["seed"]) for row in study_rows}
        kept_rows = [row for row in read(rows) if (row["variant"], row["seed"]) not in trials]
        beside = rows.with_suffix(".new")
        with beside.open("w", newline="") as file:
            columns = list(dict.fromkeys(name for row in [*kept_rows, *study_rows] for name in row))
            writer = csv.DictWriter(file, columns, lineterminator="\n")  # a run that failed has fewer figures
            writer.writeheader()
            writer.writerows([*kept_rows, *study_rows])
        beside.replace(rows)


def cells_of(task: str) -> list[tuple[str, int, str]]:
    """Returns the cells of a task: (task, group size, age)."""
    return [(task, size, age) for age in COMPARISONS[task].ages for size in COMPARISONS[task].sizes]


def untried(task: str, size: int, age: str, rows: Sequence[Row]) -> list[str]:
    """Returns the variants of a cell that are to be tried before its best rate is known."""
    rates = COMPARISONS[task].rates
    accuracy = tried(task, size, age, rows)
    if missing := [rate for rate in rates[1:-1] if rate not in accuracy]:
        return [name_of(task, size, age, rate) for rate in missing]
    top = rates.index(max(accuracy, key=accuracy.__getitem__))
    beyond = {1: rates[0], len(rates) - 2: rates[-1]}.get(top)
    return [] if beyond is None or beyond in accuracy else [name_of(task, size, age, beyond)]


def best(task: str, size: int, age: str, rows: Sequence[Row]) -> float | None:
    """Returns the rate of a cell that ended highest on the seed of the choice; None: none was tried."""
    accuracy = tried(task, size, age, rows)
    return max(accuracy, key=accuracy.__getitem__, default=None)


def tried(task: str, size: int, age: str, rows: Sequence[Row]) -> dict[float, float]:
    """Returns final accuracy by increasing rate, on the seed of the choice; 0 where a run failed."""
    names = {name_of(task, size, age, rate): rate for rate in COMPARISONS[task].rates}
    ended = {names[row["variant"]]: row for row in rows if row["variant"] in names and int(row["seed"]) == TUNED_ON}
    return {rate: float(ended[rate][SAMPLED] or 0) for rate in sorted(ended)}


def read(rows: Path) -> list[Row]:
    """Returns the rows there are; none where there is no file."""
    if not rows.exists():
        return []
    with rows.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[Row]) -> str:
    """Returns the counted runs by cell, each at its best rate: the mean with Student's 95 % interval, the worst seed
    and the largest fall.
    """
    lines = ["| task | data | K | rate | seeds | after, % | worst | largest fall |", "|---" * 8 + "|"]
    for task in COMPARISONS:
        for cell in cells_of(task):
            if (rate := best(*cell, rows)) is None:
                continue
            name = name_of(*cell, rate)
            counted = [row for row in rows if row["variant"] == name and int(row["seed"]) != TUNED_ON]
            accuracy = [100 * float(row[SAMPLED]) for row in counted if row[SAMPLED]]
            if not accuracy:
                continue
            mean = mean_interval(accuracy)
            spread = f" [{mean.low:.1f}, {mean.high:.1f}]" if len(accuracy) > 1 else ""
            fall = max(100 * float(row["fall"] or 0) for row in counted)
            _, size, age = cell
            cells = (task, age, size, f"{rate:g}", len(accuracy), f"{mean.estimate:.1f}{spread}")
            lines.append(f"| {' | '.join(map(str, cells))} | {min(accuracy):.1f} | {fall:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
