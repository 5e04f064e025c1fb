"""`tba show RUN`: prints a run so far, or its summary, and redraws its curves."""

from __future__ import annotations

from pathlib import Path

from tba.record.report import draw_curves
from tba.record.run import RunRecord
from tba.record.show import show
from tba.record.terminal import terminal


def show_run(path: Path) -> int:
    """Print a run so far, or its summary, and redraw its curves."""
    run = RunRecord.read(path)
    console = terminal()
    console.print(show(run))
    if run.metrics:
        console.print(f"curves: {draw_curves([run], path / 'curves.png')}", highlight=False)
    return 0
