"""`tba import`: imports answers from files or other runs into a run, and reports what became of each line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tba.command.options import ImportOptions
from tba.command.weights import with_weights
from tba.errors import UserError
from tba.intake.intake import Entry
from tba.intake.report import Report
from tba.recipe import Recipe
from tba.record.jsonl import JsonLines
from tba.record.terminal import terminal
from tba.record.text import printable
from tba.runtime.checkpointing import loss_of
from tba.runtime.importing import demonstrations, entries_of, intake_of, prepare
from tba.runtime.run_directory import RunDirectory
from tba.settings import find, override

FILE = "imports.jsonl"  # in the run's folder: one line for each source
_LOUD = 20_000  # lines between two progress messages


def import_files(path: Path, files: Sequence[Path], overrides: list[str], options: ImportOptions) -> int:
    """Returns exit code 0. Raises `UserError` when nothing in the files could be imported."""
    console = terminal()
    if options.recipe is not None:
        recipe = override(find(options.recipe), overrides, f"tba import {path} --recipe {options.recipe}")
        refuse(recipe, files)
        recipe, overrides = with_weights(recipe, options.recipe, overrides, lambda line: console.print(line))
        run = prepare(path, options.recipe, overrides, recipe)
    elif overrides:
        raise UserError(f"tba import takes fields such as {overrides[0]} for a new run only: give --recipe NAME too")
    else:
        run = RunDirectory.open(path)
        recipe = run.recipe_to_read(options.trust)
        refuse(recipe, files)
        if (loss := loss_of(run, run.journal(recipe))) is not None:
            raise UserError(f"{loss}; put it back if there is a copy, or resume with --accept-lost-rows first")
    take_in(recipe, run, files, options, console)
    if options.recipe is not None:
        console.print(
            f"start it with: tba train {options.recipe} --runs {path.parent} --run-name {path.name} [--offline]",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def take_in(recipe: Recipe, run: RunDirectory, files: Sequence[Path], options: ImportOptions, console: Console) -> None:
    """Import each file into the run and report on it. Raises `UserError` when nothing in them could be imported."""
    refuse(recipe, files)
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UserError(f"--max-tokens is {options.max_tokens}, it must be at least 1")
    sources = [(str(file), options.source or file.name, entries_of(file, run)) for file in files]
    _take(recipe, run, sources, options, console)


def fill(recipe: Recipe, run: RunDirectory, console: Console) -> None:
    """Import what the recipe's runs begin with (`--fill`). Raises `UserError` as `take_in` does."""
    files, shown = recipe.fill.files, recipe.fill.demonstrations
    refuse(recipe, files)
    sources = [(str(file), file.name, entries_of(file, run)) for file in files]
    if shown:
        sources.append(("the task's demonstrations", "demonstrations", demonstrations(recipe, shown)))
    if sources:
        _take(recipe, run, sources, ImportOptions(), console)


def _take(
    recipe: Recipe,
    run: RunDirectory,
    sources: Sequence[tuple[str, str, Iterable[Entry]]],
    options: ImportOptions,
    console: Console,
) -> None:
    """Import each source: (its name for people, the name its trajectories are recorded under, its lines)."""
    taken = 0
    with (
        intake_of(recipe, run, options.rewards == "claimed", options.max_tokens) as intake,
        JsonLines(run.path / FILE) as records,
    ):
        for called, known_by, entries in sources:
            report = intake.take(entries, known_by, Loud(called, console))
            if recipe.record.hide_text:
                report.hide()
            records.append(report.to_json())
            tell(report, called, console, taught=recipe.teachers.count > 0)
            taken += report.imported + report.repeated
    if not taken:
        raise UserError(
            f"none of {', '.join(called for called, _, _ in sources)} could be imported into {run.path}: the reasons "
            f"are above, and in {run.path / FILE}"
        )


def refuse(recipe: Recipe, files: Sequence[Path]) -> None:
    """Raises `UserError` for files that cannot be imported into a run of this recipe."""
    if not files:
        return
    for file in files:
        if not file.exists():
            raise UserError(f"there is no {file}: give a JSON Lines, CSV or Parquet file, or the folder of a run")
    if "step_value" in recipe.objective.needs:
        raise UserError(
            f"{type(recipe.objective).__name__} needs the values of an answer's steps, which only searchers estimate: "
            "import into a run of another objective"
        )
    if "log_behavior" in recipe.objective.needs and not all(f.is_dir() or f.suffix == ".sqlite" for f in files):
        raise UserError(
            f"{type(recipe.objective).__name__} needs the log-probabilities of the policy that sampled an answer, and "
            "answers from a file have none: import into a run of Trajectory Balance (or without a correction), or from "
            "another run's folder, which has them"
        )


@dataclass
class Loud:
    """Says now and then how far it is."""

    source: str
    console: Console
    _next: int = _LOUD

    def __call__(self, lines: int) -> None:
        if lines >= self._next:
            self.console.print(f"{self.source}: {lines:,} lines", highlight=False)
            self._next = lines + _LOUD


def tell(report: Report, called: str, console: Console, taught: bool = False) -> None:
    """What became of one source's lines, for people. taught: the run has a teacher."""
    lines = [
        f"{called}: {report.lines:,} lines, {report.imported:,} imported ({report.tokens:,} tokens), "
        f"{report.repeated:,} already imported, {report.refused:,} rejected"
    ]
    for reason, rejected in sorted(report.rejected.items(), key=lambda item: -item[1].count):
        lines.append(f"  {rejected.count:,} rejected: {reason}")
        lines += [f"    line {number}" + (f": {detail}" if detail else "") for number, detail in rejected.examples]
    if report.imported:
        lines.append(
            f"  {len(report.of):,} prompts, {report.varied:,} of them with different rewards"
            + ("; the teacher teaches on all of them" if taught else ": only these can teach the policy anything")
        )
    if report.unknown_prompts:
        lines.append(
            f"  {report.unknown_prompts:,} answer prompts that are none of the task's own: check that the prompts are "
            "written as the task writes them"
        )
    if report.claimed:
        lines.append(f"  {report.claimed:,} claimed a reward, {report.disagreed:,} another than the one recorded")
    if report.imported:
        lines.append(
            "  note: imported answers need not cover all that the policy can say (full support): Trajectory Balance "
            "determines it only where there are answers, and searchers fill the rest"
        )
    for line in lines:
        console.print(Text(printable(line, 400)), soft_wrap=True)
