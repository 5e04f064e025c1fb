"""Every objective at its best rate on a toy with stale data: k = 64 and k = 10, half of the groups old.

    python lab/benchmarks/fair.py --rows lab/results/fair_sums.csv --folder fair-runs [--at-once 1] [--seeds 3]
    python lab/benchmarks/fair.py --rows lab/results/fair_sums.csv --table
    python lab/benchmarks/fair.py --task countdown --rows lab/results/fair_countdown.csv --folder fair-runs

`--task` is `sums`, `countdown` or `calculator`; `--forms none exact` makes these alone.

Of three rates or more the best of each objective *at each k* is chosen on seed 100, which is counted nowhere (a best
rate at the edge is followed by the next, three times further, up to five rates); then come the counted seeds. The runs
are those of the studies `stability`, `stability_countdown` and `stability_calculator` (`inline`, so that the data's age
depends on the settings alone), evaluated every 40 updates on the way. The first tier is complete before the second
begins, k = 64 before k = 10. A run takes a minute or two on one core.

Every run that ends is a row at once; the same command goes on after a stop. `--cells grpo:1e-4:0` makes these alone, at
k = 64, or with `--k 10`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from forms import TUNING_SEED, Bench, Cell, Row, missing_cells, read_rows, summary, tuning_rates

from tba.objectives.correction import Correction
from tba.objectives.grpo import Grpo, dr_grpo
from tba.objectives.policy_gradient import Reinforce, proximal_rloo
from tba.objectives.ppo import Ppo
from tba.objectives.raft import Raft
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.schedules import Constant
from tba_lab.corrections import Dppo, Topr
from tba_lab.studies._base import BETA, stale
from tba_lab.studies.stability import study as stability
from tba_lab.studies.stability_calculator import study as stability_calculator
from tba_lab.studies.stability_countdown import study as stability_countdown
from tba_lab.study import Study, Variant
from tba_lab.tb_forms import LeastVarianceBalance

TASKS: Mapping[str, tuple[Study, tuple[float, ...]]] = {  # with the rates to begin with
    "sums": (stability, (3e-5, 1e-4, 3e-4)),
    "countdown": (stability_countdown, (3e-5, 1e-4, 3e-4)),
    "calculator": (stability_calculator, (6e-5, 2e-4, 6e-4)),
}
FACTOR = 3.0  # between neighbouring rates
AGES, M = (64, 10), 0.5  # k, share of recent groups
TIERS = (
    ("asymmetric", "none", "exact"),
    ("grpo", "grpo-answer", "decoupled", "raft"),
    ("reinforce", "prox-rloo", "grpo-token", "tba-prime", "ppo", "cispo"),
    ("gspo", "dppo", "topr", "dr-grpo", "rloo", "gspo-wide", "least-variance", "least-variance-ones"),
)

_beta = Constant(BETA)
OBJECTIVES: dict[str, Objective] = {
    "asymmetric": TrajectoryBalance(_beta),
    "exact": TrajectoryBalance(_beta, off_policy="exact"),
    "none": TrajectoryBalance(_beta, off_policy="none"),
    "least-variance": LeastVarianceBalance(_beta, off_policy="exact"),
    "least-variance-ones": LeastVarianceBalance(_beta, off_policy="none"),
    "tba-prime": TbaPrime(_beta, loss_aggregation="row"),
    "reinforce": Reinforce(_beta, baseline="none"),
    "rloo": Reinforce(_beta),
    "prox-rloo": proximal_rloo(_beta),
    "topr": Reinforce(_beta, baseline="mean", correction=Topr()),
    "raft": Raft(),  # rewards are 0 or 1
    "grpo": Grpo(_beta),
    "grpo-token": Grpo(_beta, correction=Correction("truncate", "token")),
    "grpo-answer": Grpo(_beta, correction=Correction("truncate", "sequence")),
    "dr-grpo": dr_grpo(_beta),
    "ppo": Ppo(_beta),
    "decoupled": Grpo(_beta, correction=Correction("decoupled")),
    "cispo": Grpo(_beta, loss_aggregation="token", correction=Correction("truncate", cap=1.28)),
    "gspo": Grpo(_beta, correction=Correction("clip", "mean", clip=3e-4, clip_high=4e-4)),
    "gspo-wide": Grpo(_beta, correction=Correction("clip", "mean")),
    "dppo": Grpo(_beta, standardise=False, loss_aggregation="token", correction=Dppo()),
}


def _variants(task: str, of_task: Study) -> dict[str, Variant]:
    recipe = stale(replace(of_task.recipe, evaluation=replace(of_task.recipe.evaluation, every=40)), AGES[0], M)
    return {f"{task}-{name}": Variant(replace(recipe, objective=objective)) for name, objective in OBJECTIVES.items()}


study = Study(  # for `tba train lab/benchmarks/fair.py::sums-exact`
    name="fair",
    recipe=stability.recipe,
    variants={name: one for task, (of_task, _) in TASKS.items() for name, one in _variants(task, of_task).items()},
)


@dataclass(frozen=True)
class FairRow(Row):
    """What came of a run, with its largest fall on the way, a share of 1."""

    fall: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--forms", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
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
        bench = Bench(
            arguments.rows, folder, "cpu", overrides, Path(__file__).resolve(), f"{arguments.task}-{{}}", FairRow
        )
        parts = [cell.split(":") for cell in arguments.cells]
        cells = [Cell(form, arguments.k, M, float(rate), int(seed)) for form, rate, seed in parts]
        tiers = [[form for form in tier if form in arguments.forms] for tier in TIERS]
        in_order = partial(wanted, seeds=range(arguments.seeds), rates=TASKS[arguments.task][1], tiers=tiers)
        if not bench.make_runs(arguments.at_once, partial(missing_cells, cells) if cells else in_order):
            return 1
    rows = [row for row in read_rows(arguments.rows, FairRow) if isinstance(row, FairRow)]
    print(table(rows, TASKS[arguments.task][1]))
    return 0


def wanted(
    done: Sequence[Row],
    seeds: Sequence[int],
    rates: Sequence[float] = TASKS["sums"][1],
    tiers: Sequence[Sequence[str]] = TIERS,
) -> list[Cell]:
    """The runs that can be made next and are not there, in order."""
    cells: list[Cell] = []
    for tier in tiers:
        for k in AGES:
            trials = {form: tuning_rates(form, done, k, rates, FACTOR) for form in tier}
            cells += [Cell(form, k, M, rate, TUNING_SEED) for form, (tries, _) in trials.items() for rate in tries]
            best = {form: rate for form, (_, rate) in trials.items() if rate is not None}
            cells += [Cell(form, k, M, rate, seed) for seed in seeds for form, rate in best.items()]
    return missing_cells(cells, done)


def table(rows: Sequence[FairRow], rates: Sequence[float] = TASKS["sums"][1]) -> str:
    """The counted runs of each objective at its best rate by k, best first; then what each rate gave on seed 100."""
    lines = []
    for k in AGES:
        lines += [f"k = {k}, m = {M:g}", "", "| objective | rate | seeds | after, % | worst | largest fall | ESS |"]
        lines.append("|---" * 7 + "|")
        tuning = {form: tuning_rates(form, rows, k, rates, FACTOR)[1] for form in OBJECTIVES}
        counted = {
            form: [r for r in rows if (r.form, r.k, r.rate) == (form, k, rate) and r.seed != TUNING_SEED]
            for form, rate in tuning.items()
        }
        counted = {form: runs for form, runs in counted.items() if runs}
        for form in sorted(counted, key=lambda form: -fmean(r.after for r in counted[form])):
            runs = counted[form]
            fall, ess = max(r.fall for r in runs), fmean(r.ess for r in runs)
            cells = [*summary(runs), f"{100 * fall:.1f}", f"{ess:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "On the seed that is not counted:"]
        for form in OBJECTIVES:
            trials = sorted((r.rate, r.after) for r in rows if (r.form, r.k, r.seed) == (form, k, TUNING_SEED))
            if trials:
                lines.append(f"{form} " + ", ".join(f"{rate:g}: {after:.1%}" for rate, after in trials))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
