"""`tba show RUN`: prints a run so far, or its summary; of several runs, what differs; of a folder of runs, which there
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tba.command.report_data import differing_settings, settings_of
from tba.errors import UserError
from tba.record.run_record import RunRecord
from tba.record.show import comparison, runs_table, show
from tba.record.terminal import terminal
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import is_held


def show_run(path: Path) -> int:
    """Print a run so far, or its summary; of a folder of runs, a line for each."""
    console = terminal()
    if run_folders := sorted(recipe_file.parent for recipe_file in path.glob("*/recipe.json")):
        console.print(runs_table([_read_or_path(run) for run in run_folders], [is_held(run) for run in run_folders]))
    else:
        console.print(show(RunRecord.read(path)))
    return 0


def _read_or_path(run: Path) -> RunRecord | Path:
    try:
        return RunRecord.read(run)
    except UserError:  # one damaged file does not hide the other runs
        return run


def show_runs(paths: Sequence[Path]) -> int:
    """Prints the settings in which several runs differ and their results. One run, or without any the folder `runs`, is
    printed as `show_run` does.
    """
    if not paths and not any(Path("runs").glob("*/recipe.json")):
        raise UserError("`tba show RUN` needs a run's folder first, such as runs/NAME")
    if len(paths) < 2:
        return show_run(*paths or [Path("runs")])
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("`tba show RUN RUN` compares different runs, but one is given twice")
    records = [RunRecord.read(path) for path in paths]
    settings = [settings_of(RunDirectory.open(path).facts["resolved"]) for path in paths]
    rows = {name: [str(values.get(name, "-")) for values in settings] for name in differing_settings(settings)}
    terminal().print(comparison(records, rows))
    return 0
