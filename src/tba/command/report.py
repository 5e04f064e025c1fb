"""`tba report RUN [RUN ...] --out report.html`: what runs did, as one page that opens offline in any browser."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tba.command.options import ReportOptions
from tba.command.run_data import different, run_data
from tba.errors import UserError
from tba.record.page import page, write_beside
from tba.record.report import ACCURACY, IDLE, PANELS, RATES
from tba.record.terminal import terminal
from tba.types import Json

MOST = 50_000  # trajectories of all runs together; of more a sample is shown
LARGEST = 20_000_000  # bytes of the page


def report_runs(runs: Sequence[Path], options: ReportOptions) -> int:
    """Write the report, and print where it is and what it leaves out."""
    if options.out.suffix != ".html":
        raise UserError(f"--out is {options.out}, but a report is a page: give a name that ends in .html")
    if not options.out.absolute().parent.is_dir():
        raise UserError(
            f"--out is {options.out}, but there is no folder {options.out.absolute().parent}: make it first"
        )
    if options.out.is_dir():
        raise UserError(f"--out is {options.out}, a folder: give another name")
    data, content = report(runs)
    beside = options.out.with_suffix(".json")
    try:
        write_beside(beside, (json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace"))
        write_beside(options.out, content)
    except OSError as error:
        raise UserError(f"{options.out} cannot be written ({error.strerror}): give another --out") from error
    console = terminal()
    for run in data["runs"]:
        console.print(f"{run['name']}: {said_of_sample(run)}", highlight=False, markup=False)
    console.print(
        f"{options.out} ({len(content) / 1e6:.1f} MB; open it in a browser), its data in {beside}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def report(runs: Sequence[Path], largest: int = LARGEST) -> tuple[dict[str, Json], bytes]:
    """Returns the data of a report, and the page that shows them, of at most `largest` bytes."""
    budget = int(0.9 * largest) // len(runs)
    while True:
        found = [run_data(path, MOST // len(runs), budget) for path in runs]
        data = {
            "made": time.time(),
            "runs": found,
            "panels": _panels(),
            "different": different([run["settings"] for run in found]),
        }
        content = page(data)
        if len(content) <= largest or not budget:
            return data, content
        over = (len(content) - largest) // len(runs)
        budget = max(0, int(0.95 * budget) - over)  # what else is in the page, or too low an estimate of bytes


def _panels() -> list[dict[str, Json]]:
    """Returns the panels of curves.png, which are the report's too."""
    kinds = {ACCURACY: "accuracy", RATES: "rates", IDLE: "shares"}
    return [
        {"title": p.title, "note": p.note, "series": p.series, "percent": p.percent, "kind": kinds.get(p, "metrics")}
        for p in PANELS
    ]


def said_of_sample(run: dict[str, Json]) -> str:
    """Returns how many of the run's trajectories are shown, and which."""
    shown = run["trajectories"]
    if shown is None:
        return "it has no journal, so that no trajectories are shown"
    if shown["shown"] == shown["of"]:
        return f"all {shown['of']:,} trajectories are shown"
    return (
        f"{shown['shown']:,} of {shown['of']:,} trajectories are shown: the newest, best, worst and most used, and of "
        "the others a sample of whole rounds and of whole prompts; counts are of all"
    )
