"""`tba resume RUN`: continues a run that was stopped, was killed or has failed from its newest checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

from tba.command.options import ResumeOptions
from tba.command.train import closing_words, code_from_trainers_node, warn_if_busy
from tba.record.faults import note_unreadable
from tba.record.live import View
from tba.record.terminal import terminal
from tba.record.text import duration
from tba.runs.resuming import begin_incarnation, resume_point
from tba.runs.running import execute
from tba.runtime.backup import backed_up_recipe, is_backup, restore_run
from tba.runtime.checkpointing import note_recoveries
from tba.runtime.elastic import JoinedSearchers
from tba.runtime.local.forkserver import prepare_forkserver
from tba.runtime.program import version, version_of
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import driver_lives
from tba.settings import override

_PATIENCE = 15.0  # seconds that a run whose driver lives has to end
_KILLED_PATIENCE = 120.0  # seconds that the other processes of a killed driver have, on a machine that may be busy


def resume_run(path: Path, overrides: list[str], options: ResumeOptions) -> int:
    """Returns the exit code, the same as that of `tba train`. The path of a backup is copied back to a run first."""
    console = terminal()
    flags = ["--runs", str(options.runs), *(["--accept-lost-rows"] if options.accept_lost_rows else [])]
    recorded_recipe = backed_up_recipe(path) if is_backup(path) else RunDirectory.open(path).recipe()
    recipe = override(recorded_recipe, overrides, "tba resume")
    if (code := code_from_trainers_node(recipe, ["resume", str(path), *overrides, *flags])) is not None:
        return code
    if is_backup(path):
        restored_run, backup = restore_run(path, options.runs / path.resolve().name)
        age = duration(time.time() - backup.time)
        console.print(
            f"copied back from the backup at {path}, which was made {age} ago", highlight=False, soft_wrap=True
        )
        path = restored_run.displayed_path
    stopped_run = RunDirectory.open(path)
    prepare_forkserver()  # before the run's lock is held, which only the run's processes inherit
    with stopped_run.hold_lock(_PATIENCE if driver_lives(stopped_run.path) else _KILLED_PATIENCE) as run:
        JoinedSearchers(run).await_start()
        recipe, checkpoint = resume_point(run, overrides, options.accept_lost_rows)
        for line in (*note_recoveries(run, run.journal(recipe)), *note_unreadable(run.path)):
            console.print(line, style="yellow", highlight=False)
        earlier_version = version_of(run.facts)
        reason = begin_incarnation(run, recipe, overrides)
        if earlier_version != version():
            console.print(f"from here on with tba {version()}; until now with {earlier_version}", highlight=False)
        start = "step 0, for there is no checkpoint yet," if checkpoint is None else checkpoint.path
        console.print(f"{recipe.name}: resuming from {start} ({reason})", highlight=False)
        warn_if_busy(console)
        summary, code = execute(recipe, run, View(console))
    return closing_words(console, recipe, [run.facts["recipe"], *run.facts["overrides"]], run, summary, code)
