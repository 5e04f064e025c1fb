"""`tba show RUN`: prints a run so far, or its summary; of several runs, what differs; of a folder of runs, which there
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tba.command.report_data import different, settings_of
from tba.errors import UserError
from tba.record.run_record import RunRecord
from tba.record.show import comparison, runs_table, show
from tba.record.terminal import terminal
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import is_held


def show_run(path: Path) -> int:
    """Print a run so far, or its summary; of a folder of runs, a line for each."""
    console = terminal()
    if found := sorted(inner.parent for inner in path.glob("*/recipe.json")):
        console.print(runs_table([_read(run) for run in found], [is_held(run) for run in found]))
    else:
        console.print(show(RunRecord.read(path)))
    return 0


def _read(run: Path) -> RunRecord | Path:
    try:
        return RunRecord.read(run)
    except UserError:  # one damaged file does not hide the other runs
        return run


def show_runs(paths: Sequence[Path]) -> int:
    """Print what the settings of several runs differ in and how they did; of one run what `show_run` does, and
    without any of the folder `runs`.
    """
    if not paths and not any(Path("runs").glob("*/recipe.json")):
        raise UserError("`tba show RUN` needs a run's folder first, such as runs/NAME")
    if len(paths) < 2:
        return show_run(*paths or [Path("runs")])
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("`tba show RUN RUN` compares different runs, but one is given twice")
    runs = [RunRecord.read(path) for path in paths]
    settings = [settings_of(RunDirectory.open(path).facts["resolved"]) for path in paths]
    differing = {name: [str(own.get(name, "-")) for own in settings] for name in different(settings)}
    terminal().print(comparison(runs, differing))
    return 0
