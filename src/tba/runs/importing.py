"""Imports answers from files or other runs into a run, and says what became of each line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import chdir, closing
from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError
from tba.imported_answers.importer import Entry
from tba.imported_answers.report import Report
from tba.recipe import Recipe
from tba.record.jsonl import JsonLines
from tba.record.text import printable
from tba.runs.recipe_resolution import Say
from tba.runtime.importing import demonstrations, entries_of, importer_of
from tba.runtime.run_directory import RunDirectory

FILE = "imports.jsonl"  # in the run's folder: one line for each source
_LINES_PER_REPORT = 20_000  # lines between two progress messages


def import_answers(
    recipe: Recipe,
    run: RunDirectory,
    files: Sequence[Path],
    say: Say,
    source: str | None = None,
    trusts_rewards: bool = False,
    max_tokens: int | None = None,
) -> None:
    """Import each file into the run and report on it. Raises `UserError` when nothing in them could be imported.

    source: the name that trajectories are recorded under; None: the file's. trusts_rewards: use the rewards that lines
    claim.
    max_tokens: of the longest answer; None: as many as the run's engine samples.
    """
    refuse_files(recipe, files)
    sources = [(str(file), source or file.name, entries_of(file, run)) for file in files]
    _import_sources(recipe, run, sources, say, trusts_rewards, max_tokens)


def import_initial_answers(recipe: Recipe, run: RunDirectory, say: Say) -> None:
    """Import the answers that the recipe's runs begin with (`--fill`). Raises `UserError` as `import_answers` does."""
    files, demonstration_count = recipe.fill.files, recipe.fill.demonstrations
    refuse_files(recipe, files)
    sources = [(str(file), file.name, entries_of(file, run)) for file in files]
    if demonstration_count:
        sources.append(("the task's demonstrations", "demonstrations", demonstrations(recipe, demonstration_count)))
    if sources:
        _import_sources(recipe, run, sources, say)


def _import_sources(
    recipe: Recipe,
    run: RunDirectory,
    sources: Sequence[tuple[str, str, Iterable[Entry]]],
    say: Say,
    trusts_rewards: bool = False,
    max_tokens: int | None = None,
) -> None:
    """Import each source: (its name for people, the name its trajectories are recorded under, its lines)."""
    usable_lines = 0
    with (
        importer_of(recipe, run, trusts_rewards, max_tokens) as importer,
        closing(JsonLines(run.path / FILE)) as records,
    ):
        for title, source_name, entries in sources:
            with chdir("."):  # in which the next file is looked for, wherever a reward goes
                report = importer.import_entries(entries, source_name, ProgressReports(title, say))
            if recipe.record.hide_text:
                report.hide_details()
            records.append(report.to_json())
            for line in report_lines(report, title, has_teacher=recipe.teachers.count > 0):
                say(line)
            usable_lines += report.imported + report.repeated
    if not usable_lines:
        raise UserError(
            f"none of {', '.join(title for title, _, _ in sources)} could be imported into {run.path}: the reasons "
            f"are above, and in {run.path / FILE}"
        )


def refuse_files(recipe: Recipe, files: Sequence[Path]) -> None:
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
class ProgressReports:
    """Says now and then how many lines of a source have been read."""

    source: str
    say: Say
    _next_line: int = _LINES_PER_REPORT

    def __call__(self, lines: int) -> None:
        if lines >= self._next_line:
            self.say(f"{self.source}: {lines:,} lines")
            self._next_line = lines + _LINES_PER_REPORT


def report_lines(report: Report, title: str, has_teacher: bool = False) -> list[str]:
    """Returns sentences about what became of one source's lines. has_teacher: the run has a teacher."""
    lines = [
        f"{title}: {report.lines:,} lines, {report.imported:,} imported ({report.tokens:,} tokens), "
        f"{report.repeated:,} already imported, {report.refused:,} rejected"
    ]
    for reason, rejection in sorted(report.rejected.items(), key=lambda item: -item[1].count):
        lines.append(f"  {rejection.count:,} rejected: {reason}")
        lines += [f"    line {number}" + (f": {detail}" if detail else "") for number, detail in rejection.examples]
    if report.imported:
        lines.append(
            f"  {len(report.rewards):,} prompts, {report.varied_prompts:,} of them with different rewards"
            + ("; the teacher teaches on all of them" if has_teacher else ": only these can teach the policy anything")
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
    return [printable(line, 400) for line in lines]
