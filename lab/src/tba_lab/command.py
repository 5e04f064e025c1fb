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
from tba.recipe_names import VARIANT_MARK
from tba.record.run_record import RunRecord
from tba.record.terminal import terminal
from tba.record.text import duration
from tba.runs.validating import validate
from tba.runtime.local.forkserver import prepare_forkserver
from tba.runtime.stop_requests import stop_requests
from tba.settings import override
from tba_lab.comparison import Outcome
from tba_lab.figures import accuracy_curve, format_figure, heading, pass_of, read_diversity
from tba_lab.study import Study, check_seeds, file_of, find_study, positions, varying_field_plots
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
from tba_lab.trial import Runner, Trial, run_in_child


@dataclass(frozen=True)
class StudyOptions:
    """Which runs of a study are made, and where they are stored."""

    seeds: str = ""  # seeds such as 0,1,2; empty: the study's own
    only: str = ""  # names or patterns of variants, such as 'tb-*,grpo-k4'; empty: all
    out: Path | None = None  # the study's folder; none: studies/NAME
    again: Literal["none", "changed", "failed", "all"] = "none"  # which existing runs are made again
    jobs: int = 1  # simultaneous runs; with more than one, times are those of a busy machine
    keep: Literal["records", "all"] = "records"  # what is kept of ended runs; all: also journals and published weights


def run_study(name: str, options: StudyOptions, fields: Sequence[str], runner: Runner = run_in_child) -> int:
    """Returns exit code 0 when every requested run has ended, 130 or 143 when Ctrl-C or SIGTERM ended it before."""
    console = terminal()
    study = find_study(name)
    folder = options.out or Path("studies") / study.name
    variants = study.matching([p.strip() for p in options.only.split(",") if p.strip()] or ["*"])
    seeds = _seeds(options.seeds) if options.seeds else study.seeds
    check_seeds(seeds, f"tba-lab study {name}")
    if options.jobs < 1:
        raise UserError(f"--jobs is {options.jobs}: give the number of runs at a time, 1 or more")
    all_trials = _all_trials(name, study, {v: set(seeds) for v in variants}, fields, folder, options.keep == "all")
    trials = [t for seed in seeds for t in all_trials if t.seed == seed and t.variant in variants]
    for note in _notes(trials):
        console.print(f"note: {note}", style="yellow")
    pending_trials = [trial for trial in trials if _is_pending(trial, options.again)]
    console.print(
        f"{study.name}: {len(variants)} variants x {len(seeds)} seeds, {len(trials) - len(pending_trials)} of "
        f"{len(trials)} runs have ended; in {folder}",
        highlight=False,
    )
    progress = Progress(
        console, len(trials), len(trials) - len(pending_trials), lambda: _write(_comparison(study, all_trials), folder)
    )
    prepare_forkserver()
    exit_code = _run_all(pending_trials, options.jobs, progress, runner)
    _print_report(study, all_trials, folder, console)
    if exit_code and any(trial.state() not in ("ended", "failed") for trial in pending_trials):
        console.print("stopped: the same command continues from here", style="yellow")
        return exit_code
    return 0


@dataclass
class Progress:
    """Reports runs as they end, and updates the tables."""

    console: Console
    total: int
    ended_count: int
    write: Callable[[], object]

    def report(self, trial: Trial, result: str) -> None:
        """Report that one run has ended."""
        self.ended_count += 1
        count = f"[{self.ended_count}/{self.total}]"
        self.console.print(f"{count} {trial.variant}, seed {trial.seed}: {result}", highlight=False)
        self.write()


def _run_all(pending_trials: Sequence[Trial], jobs: int, progress: Progress, runner: Runner) -> int:
    """Make the runs in order, `jobs` at once; returns 0, or the exit code of the signal that stopped us."""
    waiting_trials, running_trials = list(pending_trials), dict[Future[str], Trial]()
    with stop_requests() as stop, ThreadPoolExecutor(jobs) as pool:
        while running_trials or (waiting_trials and not stop()):
            while waiting_trials and len(running_trials) < jobs and not stop():
                trial = waiting_trials.pop(0)
                running_trials[pool.submit(_carry_out_trial, trial, stop, runner)] = trial
            for future in wait(running_trials, return_when=FIRST_COMPLETED).done:
                progress.report(running_trials.pop(future), future.result())
        return stop.exit_code if stop() else 0


def _carry_out_trial(trial: Trial, stop: Callable[[], bool], runner: Runner) -> str:
    """Make one run; returns its outcome in a few words."""
    start = time.monotonic()
    trial.carry_out(stop, runner)
    outcome = trial.outcome()
    if outcome is None:
        return "stopped"
    if outcome.failure:
        return f"failed: {outcome.failure}"
    metric = trial.study.metric
    value = outcome.figures.get(metric)
    metric_text = f"{heading(metric)} {format_figure(metric, value)}, " if value is not None else ""
    return f"{metric_text}{duration(time.monotonic() - start)}"


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--seeds is {text!r}: give integers with commas between, as 0,1,2") from error


def _all_trials(
    name: str, study: Study, requested_seeds: Mapping[str, set[int]], fields: Sequence[str], folder: Path, keep: bool
) -> list[Trial]:
    """Returns the requested trials (variant -> seeds) and others that the folder has: the rows of the table."""
    if any(field.split("=")[0] == "--seed" for field in fields):
        raise UserError("tba-lab study takes --seeds, as 0,1,2, and not --seed: give the seeds there")
    trials = []
    for variant in study.variants:
        seeds = sorted(requested_seeds.get(variant, set()) | _existing_seeds(folder, variant))
        if not seeds:
            continue
        recipe = override(study.recipe_of(variant), fields, f"tba-lab study {name}, variant {variant}")
        for seed in seeds:
            source = f"{file_of(name).resolve()}{VARIANT_MARK}{variant}"
            path, overrides = folder / "runs" / f"{variant}-{seed}", ("--seed", str(seed), *fields)
            seeded_recipe = replace(recipe, seed=seed)
            trials.append(Trial(study, variant, seed, source, overrides, seeded_recipe, path, keep))
    return trials


def _existing_seeds(folder: Path, variant: str) -> set[int]:
    suffixes = (path.name.removeprefix(f"{variant}-") for path in (folder / "runs").glob(f"{variant}-*"))
    return {int(suffix) for suffix in suffixes if suffix.isdecimal()}


def _notes(trials: Sequence[Trial]) -> list[str]:
    """Returns warnings, each once. Raises `UserError` for a variant that cannot run, before any does."""
    variants_by_warning: dict[str, list[str]] = {}
    for trial in {t.variant: t for t in trials}.values():
        try:
            warnings = validate(trial.recipe)
        except UserError as error:
            raise UserError(f"variant {trial.variant}: {error}") from error
        for warning in warnings:
            variants_by_warning.setdefault(warning, []).append(trial.variant)
    return [f"{', '.join(variants)}: {warning}" for warning, variants in variants_by_warning.items()]


def _is_pending(trial: Trial, again: str) -> bool:
    """Returns whether the trial has to be run. Raises `UserError` for another recipe's run, unless it may go."""
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


def _print_report(study: Study, trials: Sequence[Trial], folder: Path, console: Console) -> None:
    """Write and print tables and plots of what has ended so far, if anything has."""
    comparison = _comparison(study, trials)
    if not _write(comparison, folder):
        return
    console.print(view(comparison))
    files = [folder / TABLE_FILE, *(path for path in _plots(study, trials, comparison.outcomes, folder) if path)]
    console.print(f"\ntables and plots: {', '.join(map(str, files))}", highlight=False)


def _plots(study: Study, trials: Sequence[Trial], outcomes: Sequence[Outcome], folder: Path) -> Iterator[Path | None]:
    ended_runs = {(o.variant, o.seed) for o in outcomes if not o.failure}
    recipes = {t.variant: t.recipe for t in trials if any(o.variant == t.variant for o in outcomes)}
    lines = lines_of(list(recipes), {variant: study.family(variant) for variant in recipes})
    curves: dict[str, list[Curve]] = {variant: [] for variant in recipes}
    for trial in trials:
        if (trial.variant, trial.seed) in ended_runs:
            curves[trial.variant].append(accuracy_curve(RunRecord.read(trial.path), study.metric))
    yield draw_over_time(folder / "over-time.png", study.name, study.metric, curves, lines)
    yield draw_frontier(folder / "frontier.png", study.name, outcomes, lines)
    ended_trials = [t for t in trials if (t.variant, t.seed) in ended_runs]
    yield from _diversity_plots(study, ended_trials, outcomes, lines, folder)
    for plot in study.plots or varying_field_plots(recipes):
        y = plot.y or study.metric
        x_by_variant = positions(plot.x, recipes, outcomes)
        plot_lines = [line for line in lines if any(fnmatch.fnmatchcase(line.family, p) for p in plot.families)]
        if plot.single_line:
            plot_lines = [Line("", [v for line in plot_lines for v in line.variants])]
        file = folder / f"{y.replace('/', '-')}-against-{plot.x}.png"
        yield draw_against(file, study.name, y, plot.label or plot.x, x_by_variant, outcomes, plot_lines)


def _diversity_plots(
    study: Study, trials: Sequence[Trial], outcomes: Sequence[Outcome], lines: Sequence[Line], folder: Path
) -> Iterator[Path | None]:
    """Draw pass@k over k, and different right answers over accuracy, of the runs whose diversity was measured."""
    diversities = [(trial.variant, figures) for trial in trials if (figures := read_diversity(trial.path))]
    if not study.diversity_samples or not diversities:
        return
    values_before = [figures["before"]["pass_at"] for _, figures in diversities]
    values_after: dict[str, list[Sequence[float]]] = {}
    for variant, figures in diversities:
        values_after.setdefault(variant, []).append(figures["after"]["pass_at"])
    yield draw_pass_at_k(folder / "pass-at-k.png", study.name, values_before, values_after, lines)
    distinct_before = float(np.mean([figures["before"]["distinct"] for _, figures in diversities]))
    start = (float(np.mean(values_before, axis=0)[0]), distinct_before)
    accuracy = pass_of(1, study.diversity_samples)
    yield draw_frontier(folder / "diversity.png", study.name, outcomes, lines, accuracy, "distinct", start)
