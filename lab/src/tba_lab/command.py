"""`tba-lab study`: runs variants x seeds, each in a process of its own; then tables and plots of all that ended.

    studies/NAME/   runs/VARIANT-SEED/ (a run's directory)   logs/VARIANT-SEED.log
                    table.md  table.csv  runs.csv  *.png

Invariant: the folder is the state (see `trial`), so that a study can be stopped and continued at any time. Seeds are
the outer loop, so that a drift of the machine's speed affects all variants alike. A failed run is a row of the table
and does not end the study.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from tba.errors import UserError
from tba.record.run_record import RunRecord
from tba.record.terminal import terminal
from tba.record.text import duration
from tba.runs.validating import validate
from tba.runtime.local.forkserver import prepare
from tba.runtime.stop_requests import stop_requests
from tba.settings import override
from tba.shipped import VARIANT_MARK
from tba_lab.comparison import Outcome
from tba_lab.figures import accuracy_curve, heading, pass_of, read_diversity, shown
from tba_lab.study import Study, check_seeds, file_of, find_study, positions, varying
from tba_lab.study_plots import (
    Curve,
    Line,
    draw_against,
    draw_frontier,
    draw_over_time,
    draw_pass_at_k,
    lines_of,
)
from tba_lab.study_table import TABLE_FILE, Comparison, view, write_tables
from tba_lab.trial import Runner, Trial, in_child


@dataclass(frozen=True)
class StudyOptions:
    """Which runs of a study are made, and where they are stored."""

    seeds: str = ""  # seeds such as 0,1,2; empty: the study's own
    only: str = ""  # names or patterns of variants, such as 'tb-*,grpo-k4'; empty: all
    out: Path | None = None  # the study's folder; none: studies/NAME
    again: Literal["none", "changed", "failed", "all"] = "none"  # which existing runs are made again
    jobs: int = 1  # simultaneous runs; with more than one, times are those of a busy machine
    keep: Literal["records", "all"] = "records"  # what is kept of ended runs; all: also journals and published weights


def run_study(name: str, options: StudyOptions, fields: Sequence[str], runner: Runner = in_child) -> int:
    """Returns exit code 0 when every requested run has ended, 130 or 143 when Ctrl-C or SIGTERM ended it before."""
    console = terminal()
    study = find_study(name)
    folder = options.out or Path("studies") / study.name
    chosen = study.matching([p.strip() for p in options.only.split(",") if p.strip()] or ["*"])
    seeds = _seeds(options.seeds) if options.seeds else study.seeds
    check_seeds(seeds, f"tba-lab study {name}")
    if options.jobs < 1:
        raise UserError(f"--jobs is {options.jobs}: give the number of runs at a time, 1 or more")
    everything = _every_trial(name, study, {v: set(seeds) for v in chosen}, fields, folder, options.keep == "all")
    trials = [t for seed in seeds for t in everything if t.seed == seed and t.variant in chosen]
    for note in _notes(trials):
        console.print(f"note: {note}", style="yellow")
    left = [trial for trial in trials if _is_left(trial, options.again)]
    console.print(
        f"{study.name}: {len(chosen)} variants x {len(seeds)} seeds, {len(trials) - len(left)} of {len(trials)} runs "
        f"have ended; in {folder}",
        highlight=False,
    )
    told = Progress(
        console, len(trials), len(trials) - len(left), lambda: _write(_comparison(study, everything), folder)
    )
    prepare()
    stopped = _run_all(left, options.jobs, told, runner)
    _report(study, everything, folder, console)
    if stopped and any(trial.state() not in ("ended", "failed") for trial in left):
        console.print("stopped: the same command continues from here", style="yellow")
        return stopped
    return 0


@dataclass
class Progress:
    """Reports runs as they end, and updates the tables."""

    console: Console
    total: int
    ended: int
    write: Callable[[], object]

    def tell(self, trial: Trial, what: str) -> None:
        """Report that one run has ended."""
        self.ended += 1
        self.console.print(f"[{self.ended}/{self.total}] {trial.variant}, seed {trial.seed}: {what}", highlight=False)
        self.write()


def _run_all(left: Sequence[Trial], jobs: int, progress: Progress, runner: Runner) -> int:
    """Make the runs in order, `jobs` at once; returns 0, or the exit code of the signal that stopped us."""
    waiting, going = list(left), dict[Future[str], Trial]()
    with stop_requests() as stop, ThreadPoolExecutor(jobs) as pool:
        while going or (waiting and not stop()):
            while waiting and len(going) < jobs and not stop():
                trial = waiting.pop(0)
                going[pool.submit(_carried_out, trial, stop, runner)] = trial
            for done in wait(going, return_when=FIRST_COMPLETED).done:
                progress.tell(going.pop(done), done.result())
        return stop.exit_code if stop() else 0


def _carried_out(trial: Trial, stop: Callable[[], bool], runner: Runner) -> str:
    """Make one run; returns its outcome in a few words."""
    began = time.monotonic()
    trial.carry_out(stop, runner)
    outcome = trial.outcome()
    if outcome is None:
        return "stopped"
    if outcome.failure:
        return f"failed: {outcome.failure}"
    metric = trial.study.metric
    value = outcome.figures.get(metric)
    said = f"{heading(metric)} {shown(metric, value)}, " if value is not None else ""
    return f"{said}{duration(time.monotonic() - began)}"


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--seeds is {text!r}: give integers with commas between, as 0,1,2") from error


def _every_trial(
    name: str, study: Study, asked: Mapping[str, set[int]], fields: Sequence[str], folder: Path, keep: bool
) -> list[Trial]:
    """Returns the requested trials (variant -> seeds) and others that the folder has: the rows of the table."""
    if any(field.split("=")[0] == "--seed" for field in fields):
        raise UserError("tba-lab study takes --seeds, as 0,1,2, and not --seed: give the seeds there")
    found = []
    for variant in study.variants:
        seeds = sorted(asked.get(variant, set()) | _seeds_there(folder, variant))
        if not seeds:
            continue
        recipe = override(study.recipe_of(variant), fields, f"tba-lab study {name}, variant {variant}")
        for seed in seeds:
            source = f"{file_of(name).resolve()}{VARIANT_MARK}{variant}"
            path, overrides = folder / "runs" / f"{variant}-{seed}", ("--seed", str(seed), *fields)
            made = replace(recipe, seed=seed)
            found.append(Trial(study, variant, seed, source, overrides, made, path, keep))
    return found


def _seeds_there(folder: Path, variant: str) -> set[int]:
    ends = (path.name.removeprefix(f"{variant}-") for path in (folder / "runs").glob(f"{variant}-*"))
    return {int(end) for end in ends if end.isdecimal()}


def _notes(trials: Sequence[Trial]) -> list[str]:
    """Returns warnings, each once. Raises `UserError` for a variant that cannot run, before any does."""
    said: dict[str, list[str]] = {}
    for trial in {t.variant: t for t in trials}.values():
        try:
            warnings = validate(trial.recipe)
        except UserError as error:
            raise UserError(f"variant {trial.variant}: {error}") from error
        for warning in warnings:
            said.setdefault(warning, []).append(trial.variant)
    return [f"{', '.join(variants)}: {warning}" for warning, variants in said.items()]


def _is_left(trial: Trial, again: str) -> bool:
    """Whether the trial has to be run. Raises `UserError` for a run of another recipe, unless it may be replaced."""
    state = trial.state()
    if state == "other recipe" and again not in ("changed", "all"):
        raise UserError(
            f"the run at {trial.path} is of another recipe ({trial.difference()}): give --again changed to make it "
            "again, or another --out"
        )
    return again == "all" or state not in ("ended", "failed") or (state == "failed" and again == "failed")


def _comparison(study: Study, trials: Sequence[Trial]) -> Comparison:
    """Returns the comparison of all runs that have ended under their current recipe."""
    return Comparison(
        name=study.name,
        description=study.description,
        outcomes=[outcome for trial in trials if (outcome := trial.outcome()) is not None],
        variants=list(study.variants),
        metric=study.metric,
        baselines={v: study.baseline_of(v) for v in study.variants if study.baseline},
        margin=study.margin,
        target=study.target,
        columns=study.columns,
    )


def _write(comparison: Comparison, folder: Path) -> bool:
    """Write the tables, if any run has ended."""
    if comparison.outcomes:
        write_tables(comparison, folder)
    return bool(comparison.outcomes)


def _report(study: Study, trials: Sequence[Trial], folder: Path, console: Console) -> None:
    """Write and print tables and plots of what has ended so far, if anything has."""
    comparison = _comparison(study, trials)
    if not _write(comparison, folder):
        return
    console.print(view(comparison))
    made = [folder / TABLE_FILE, *(path for path in _plots(study, trials, comparison.outcomes, folder) if path)]
    console.print(f"\ntables and plots: {', '.join(map(str, made))}", highlight=False)


def _plots(study: Study, trials: Sequence[Trial], outcomes: Sequence[Outcome], folder: Path) -> Iterator[Path | None]:
    there = {(o.variant, o.seed) for o in outcomes if not o.failure}
    recipes = {t.variant: t.recipe for t in trials if any(o.variant == t.variant for o in outcomes)}
    lines = lines_of(list(recipes), {variant: study.family(variant) for variant in recipes})
    curves: dict[str, list[Curve]] = {variant: [] for variant in recipes}
    for trial in trials:
        if (trial.variant, trial.seed) in there:
            curves[trial.variant].append(accuracy_curve(RunRecord.read(trial.path), study.metric))
    yield draw_over_time(folder / "over-time.png", study.name, study.metric, curves, lines)
    yield draw_frontier(folder / "frontier.png", study.name, outcomes, lines)
    yield from _diversity_plots(study, [t for t in trials if (t.variant, t.seed) in there], outcomes, lines, folder)
    for against in study.against or varying(recipes):
        y = against.y or study.metric
        at = positions(against.x, recipes, outcomes)
        drawn = [line for line in lines if any(fnmatch.fnmatchcase(line.family, p) for p in against.families)]
        if against.joined:
            drawn = [Line("", [v for line in drawn for v in line.variants])]
        file = folder / f"{y.replace('/', '-')}-against-{against.x}.png"
        yield draw_against(file, study.name, y, against.label or against.x, at, outcomes, drawn)


def _diversity_plots(
    study: Study, trials: Sequence[Trial], outcomes: Sequence[Outcome], lines: Sequence[Line], folder: Path
) -> Iterator[Path | None]:
    """Draw pass@k over k, and different right answers over accuracy, of the runs whose diversity was measured."""
    found = [(trial.variant, measured) for trial in trials if (measured := read_diversity(trial.path))]
    if not study.diversity_samples or not found:
        return
    before = [measured["before"]["pass_at"] for _, measured in found]
    after: dict[str, list[Sequence[float]]] = {}
    for variant, measured in found:
        after.setdefault(variant, []).append(measured["after"]["pass_at"])
    yield draw_pass_at_k(folder / "pass-at-k.png", study.name, before, after, lines)
    start = (float(np.mean(before, axis=0)[0]), float(np.mean([m["before"]["distinct"] for _, m in found])))
    accuracy = pass_of(1, study.diversity_samples)
    yield draw_frontier(folder / "diversity.png", study.name, outcomes, lines, accuracy, "distinct", start)
