"""A study's tables: as a page (Markdown), as data (CSV) and on the terminal (rich), from the same cells.

Invariant: every mean comes with its number of runs, and a variant that failed has a row that says so.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tba.record.text import printable
from tba_lab.comparison import Outcome, Row, Statistic, Versus, variant_rows, versus
from tba_lab.figures import COLUMNS, DATA, MACHINE, format_figure, heading

TABLE_FILE, DATA_FILE, RUNS_FILE = "table.md", "table.csv", "runs.csv"

NOTE = (
    "Mean ± standard deviation over runs [95 % interval of the mean by Student's t]; n is the number of runs that "
    "ended well, and a figure that fewer have says how many. Differences from a baseline are by t too (Welch)."
)


@dataclass(frozen=True)
class Comparison:
    """Everything the tables are made of."""

    name: str
    description: str
    outcomes: Sequence[Outcome]
    variants: Sequence[str]  # their order
    metric: str
    baselines: Mapping[str, str] = field(default_factory=dict)  # variant -> what it is held against
    margin: float = 0.03
    target: float | None = None
    columns: Sequence[str] = ()  # empty: all


@dataclass(frozen=True)
class Sheet:
    """One table of cells; the first column is text."""

    title: str
    headings: Sequence[str]
    cells: Sequence[Sequence[str]]


def write_tables(comparison: Comparison, directory: Path) -> None:
    """Writes `table.md`, `table.csv` (a line per variant and figure) and `runs.csv` (a line per run), atomically."""
    _write(directory / TABLE_FILE, page(comparison))
    _write(directory / DATA_FILE, _csv(_statistic_lines(comparison)))
    _write(directory / RUNS_FILE, _csv(_run_lines(comparison)))


def page(comparison: Comparison) -> str:
    """Returns the study's Markdown page."""
    parts = [f"# {comparison.name}", comparison.description, NOTE]
    for sheet in sheets(comparison, intervals=True):
        lines = [sheet.headings, ["---", *["---:"] * (len(sheet.headings) - 1)], *sheet.cells]
        table = "\n".join(
            f"| {' | '.join(printable(cell, newlines=False).replace('|', chr(92) + '|') for cell in line)} |"
            for line in lines
        )
        parts.append(f"## {sheet.title}\n\n{table}")
    failure_lines = [
        f"- {o.variant}, seed {o.seed}: {printable(o.failure, 500, newlines=False)}"
        for o in comparison.outcomes
        if o.failure
    ]
    if failure_lines:
        parts.append("## Runs that failed\n\n" + "\n".join(failure_lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def view(comparison: Comparison) -> RenderableType:
    """Returns the study's tables for a terminal, without the intervals."""
    parts: list[RenderableType] = []
    for sheet in sheets(comparison, intervals=False):
        parts.append(Padding(Group(Text(sheet.title, style="bold"), _Columns(sheet)), (1, 0, 0, 0)))
    return Group(*parts)


@dataclass(frozen=True)
class _Columns:
    """A sheet as wide as the terminal: columns that do not fit continue below, beside the first column again."""

    sheet: Sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [[printable(cell, newlines=False) for cell in line] for line in self.sheet.cells]
        words = [max(map(len, name.split())) for name in self.sheet.headings]
        widths = [max(map(len, column)) for column in zip(map("-".__mul__, words), *lines, strict=True)]
        widths[0] = min(widths[0], max(8, options.max_width - 6 - max(widths[1:], default=0)))
        parts: list[list[int]] = [] if widths[1:] else [[]]
        for i in range(1, len(widths)):
            if not parts or 2 + sum(widths[j] + 2 for j in (0, *parts[-1], i)) > options.max_width:
                parts.append([])
            parts[-1].append(i)
        for number, part in enumerate(parts):
            table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
            for i in (0, *part):
                justify: JustifyMethod = "right" if i else "left"
                table.add_column(
                    self.sheet.headings[i], justify=justify, overflow="fold", width=widths[i], vertical="bottom"
                )
            for line in lines:
                table.add_row(*(line[i] for i in (0, *part)))
            yield Padding(table, (1 if number else 0, 0, 0, 2))


def sheets(comparison: Comparison, intervals: bool) -> Iterator[Sheet]:
    """Returns the tables: results, their costs, differences from the baseline."""
    rows = variant_rows(comparison.outcomes, comparison.variants)
    names = recorded_figures(rows, comparison.columns)
    title = "Results" if comparison.target is None else f"Results (target: {100 * comparison.target:g} %)"
    yield _sheet(title, [n for n in names if n not in (*DATA, *MACHINE)], rows, intervals, failures=True)
    for part, figure_names in (("data", DATA), ("time and memory", MACHINE)):
        if part_names := [n for n in names if n in figure_names]:
            yield _sheet(f"What it took: {part}", part_names, rows, intervals=False)
    if comparisons := versus(comparison.outcomes, comparison.baselines, comparison.metric, comparison.margin):
        yield _differences(comparisons, comparison)


def recorded_figures(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Returns the figures that some run has, in the order of `COLUMNS`, other pass@K first; or those in `columns`."""
    recorded_names = dict.fromkeys(name for row in rows for name in row.statistics)
    ordered_names = [name for name in recorded_names if name not in COLUMNS]
    ordered_names += [name for name in COLUMNS if name in recorded_names]
    return [name for name in ordered_names if not columns or name in columns]


def cell(name: str, statistic: Statistic | None, runs: int, interval: bool) -> str:
    """Returns `93.2 ± 0.4 [92.9, 93.6]`, with the number of runs if not all have the figure."""
    if statistic is None:
        return "-"
    text = format_figure(name, statistic.mean)
    if not math.isnan(statistic.spread):
        text += f" ± {format_figure(name, statistic.spread)}"
        if interval:
            text += f" [{format_figure(name, statistic.low)}, {format_figure(name, statistic.high)}]"
    return text if statistic.n == runs else f"{text} ({statistic.n} of {runs})"


def _sheet(title: str, names: Sequence[str], rows: Sequence[Row], intervals: bool, failures: bool = False) -> Sheet:
    failures = failures and any(row.failures for row in rows)
    cells = []
    for row in rows:
        runs = row.runs - len(row.failures)  # that ended well
        line = [row.variant, str(runs), *(cell(n, row.statistics.get(n), runs, intervals) for n in names)]
        cells.append([*line, _failures(row)] if failures else line)
    return Sheet(title, ["variant", "n", *map(heading, names), *(["failed"] if failures else [])], cells)


def _failures(row: Row) -> str:
    if not row.failures:
        return ""
    reasons = dict.fromkeys(failure.partition(":")[0] for failure in row.failures)
    return f"{len(row.failures)} of {row.runs}: {'; '.join(reasons)}"


def _differences(comparisons: Sequence[Versus], comparison: Comparison) -> Sheet:
    margin = f"{100 * comparison.margin:g}"
    headings = [
        "variant",
        "against",
        f"{heading(comparison.metric)}: difference",
        "95 % interval",
        f"not worse by {margin} points",
    ]
    cells = []
    for v in comparisons:
        d = v.difference
        has_interval = math.isfinite(d.low)
        interval = f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}]" if has_interval else "one run only"
        answer = v.not_worse if not v.remark else f"{v.not_worse} ({v.remark})"
        cells.append([v.variant, v.baseline, f"{100 * d.estimate:+.1f}", interval, answer])
    return Sheet("Differences", headings, cells)


def _statistic_lines(comparison: Comparison) -> Iterator[Sequence[object]]:
    yield ("variant", "figure", "mean", "spread", "low", "high", "n", "failed", "runs")
    rows = variant_rows(comparison.outcomes, comparison.variants)
    for row in rows:
        for name in recorded_figures([row], ()):
            s = row.statistics[name]
            spread = ("", "", "") if math.isnan(s.spread) else (s.spread, s.low, s.high)
            yield (row.variant, name, s.mean, *spread, s.n, len(row.failures), row.runs)
        if not row.statistics:
            yield (row.variant, "", "", "", "", "", 0, len(row.failures), row.runs)


def _run_lines(comparison: Comparison) -> Iterator[Sequence[object]]:
    names = recorded_figures(variant_rows(comparison.outcomes, comparison.variants), ())
    yield ("variant", "seed", "failure", *names)
    place = {name: i for i, name in enumerate(comparison.variants)}
    for o in sorted(comparison.outcomes, key=lambda o: (place[o.variant], o.seed)):
        yield (o.variant, o.seed, o.failure, *(o.figures.get(name, "") for name in names))


def _csv(lines: Iterator[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
