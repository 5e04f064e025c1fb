"""Every objective at its best rate on sums with stale data: k = 64 and k = 10, half of the groups old, 400 updates.

    nice -n 19 python lab/benchmarks/fair.py --rows lab/results/fair.csv --folder fair-runs [--at-once 1] [--seeds 3]
    python lab/benchmarks/fair.py --rows lab/results/fair.csv --table

Of three rates or more the best of each objective *at each k* is chosen on seed 100, which is counted nowhere (a best
rate at the edge is followed by the next, three times further, up to five rates); then come the counted seeds. The runs
are those of the study `stability` (`inline`, so that the data's age depends on the settings alone; 10,000 problems at
the end), with 1,000 problems every 40 updates on the way. The first tier is complete before the second begins, k = 64
before k = 10. A run takes a minute or two on one core.

Every run that ends is a row at once; the same command goes on after a stop. `--cells grpo:1e-4:0` makes these alone, at
k = 64, or with `--k 10`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from forms import TUNED_ON, Bench, Cell, Row, interval, left, read, tried

from tba.objectives.correction import Correction
from tba.objectives.grpo import Grpo, dr_grpo
from tba.objectives.policy_gradient import Reinforce, proximal_rloo
from tba.objectives.raft import Raft
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.schedules import Constant
from tba_lab.corrections import Dppo, Topr
from tba_lab.studies._base import BETA, stale
from tba_lab.studies.stability import study as stability
from tba_lab.study import Study, Variant

RATES, FACTOR = (3e-5, 1e-4, 3e-4), 3.0
AGES, M = (64, 10), 0.5  # k, share of recent groups
TIERS = (
    ("asymmetric", "none", "grpo", "grpo-answer", "decoupled", "raft"),
    ("reinforce", "prox-rloo", "grpo-token", "exact", "tba-prime", "cispo"),
    ("least-variance", "gspo", "dppo", "topr", "dr-grpo", "rloo", "gspo-wide"),
)

_beta = Constant(BETA)
OBJECTIVES: dict[str, Objective] = {
    "asymmetric": TrajectoryBalance(_beta),
    "exact": TrajectoryBalance(_beta, off_policy="exact"),
    "none": TrajectoryBalance(_beta, off_policy="none"),
    "least-variance": TrajectoryBalance(_beta, log_z="least_variance", off_policy="none"),
    "tba-prime": TbaPrime(_beta, per="row"),
    "reinforce": Reinforce(_beta, baseline="none"),
    "rloo": Reinforce(_beta),
    "prox-rloo": proximal_rloo(_beta),
    "topr": Reinforce(_beta, baseline="mean", correction=Topr()),
    "raft": Raft(),  # rewards are 0 or 1
    "grpo": Grpo(_beta),
    "grpo-token": Grpo(_beta, correction=Correction("truncate", "token")),
    "grpo-answer": Grpo(_beta, correction=Correction("truncate", "sequence")),
    "dr-grpo": dr_grpo(_beta),
    "decoupled": Grpo(_beta, correction=Correction("decoupled")),
    "cispo": Grpo(_beta, per="token", correction=Correction("truncate", cap=1.28)),
    "gspo": Grpo(_beta, correction=Correction("clip", "mean", clip=3e-4, clip_high=4e-4)),
    "gspo-wide": Grpo(_beta, correction=Correction("clip", "mean")),
    "dppo": Grpo(_beta, standardise=False, per="token", correction=Dppo()),
}
base = stale(
    replace(stability.recipe, evaluation=replace(stability.recipe.evaluation, every=40, problems_during=1000)),
    AGES[0],
    M,
)
study = Study(  # for `tba train lab/benchmarks/fair.py::exact`
    name="fair",
    recipe=base,
    variants={name: Variant(replace(base, objective=objective)) for name, objective in OBJECTIVES.items()},
)


@dataclass(frozen=True)
class FairRow(Row):
    """What came of a run, with its largest fall on the way, a share of 1."""

    fall: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", nargs="+", default=[], metavar="FORM:RATE:SEED", help="only these")
    parser.add_argument("--k", type=int, default=AGES[0], help="of --cells")
    parser.add_argument("--folder", type=Path, help="of the runs while they are made; default: beside the rows")
    arguments, overrides = parser.parse_known_args()
    if not arguments.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        folder = arguments.folder or arguments.rows.parent / "runs"
        bench = Bench(arguments.rows, folder, "cpu", overrides, Path(__file__).resolve(), FairRow)
        parts = [cell.split(":") for cell in arguments.cells]
        cells = [Cell(form, arguments.k, M, float(rate), int(seed)) for form, rate, seed in parts]
        missing = partial(left, cells) if cells else partial(wanted, seeds=range(arguments.seeds))
        if not bench.go(arguments.at_once, missing):
            return 1
    print(table([row for row in read(arguments.rows, FairRow) if isinstance(row, FairRow)]))
    return 0


def wanted(done: Sequence[Row], seeds: Sequence[int]) -> list[Cell]:
    """The runs that can be made next and are not there, in order."""
    cells: list[Cell] = []
    for tier in TIERS:
        for k in AGES:
            trials = {form: tried(form, done, k, RATES, FACTOR) for form in tier}
            cells += [Cell(form, k, M, rate, TUNED_ON) for form, (rates, _) in trials.items() for rate in rates]
            best = {form: rate for form, (_, rate) in trials.items() if rate is not None}
            cells += [Cell(form, k, M, rate, seed) for seed in seeds for form, rate in best.items()]
    return left(cells, done)


def table(rows: Sequence[FairRow]) -> str:
    """The counted runs of each objective at its best rate by k, best first; then what each rate gave on seed 100."""
    lines = []
    for k in AGES:
        lines += [f"k = {k}, m = {M:g}", "", "| objective | rate | seeds | after, % | worst | largest fall | ESS |"]
        lines.append("|---" * 7 + "|")
        tuning = {form: tried(form, rows, k, RATES, FACTOR)[1] for form in OBJECTIVES}
        counted = {
            form: [r for r in rows if (r.form, r.k, r.rate) == (form, k, rate) and r.seed != TUNED_ON]
            for form, rate in tuning.items()
        }
        counted = {form: runs for form, runs in counted.items() if runs}
        for form in sorted(counted, key=lambda form: -fmean(r.after for r in counted[form])):
            runs = counted[form]
            cells = [
                form,
                f"{runs[0].rate:g}",
                str(len(runs)),
                interval([100 * r.after for r in runs]),
                f"{100 * min(r.after for r in runs):.1f}",
                f"{100 * max(r.fall for r in runs):.1f}",
                f"{fmean(r.ess for r in runs):.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "On the seed that is not counted:"]
        for form in OBJECTIVES:
            trials = sorted((r.rate, r.after) for r in rows if (r.form, r.k, r.seed) == (form, k, TUNED_ON))
            if trials:
                lines.append(f"{form} " + ", ".join(f"{rate:g}: {after:.1%}" for rate, after in trials))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
