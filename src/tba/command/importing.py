"""`tba import`: imports answers from files or other runs into a run, and reports what became of each line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tba.command.options import ImportOptions
from tba.errors import UserError
from tba.record.live import View
from tba.record.terminal import terminal
from tba.replay.follower import JournalFollower
from tba.runs.importing import import_answers, refuse_files
from tba.runs.recipe_resolution import with_weights
from tba.runtime.checkpointing import loss_of
from tba.runtime.importing import prepare_run
from tba.runtime.run_directory import RunDirectory, new_path
from tba.settings import find, override


def import_files(path: Path, files: Sequence[Path], overrides: list[str], options: ImportOptions) -> int:
    """Returns exit code 0. Raises `UserError` when nothing in the files could be imported."""
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UserError(f"--max-tokens is {options.max_tokens}, it must be at least 1")
    console = terminal()
    view = View(console)
    if options.recipe is not None:
        new_path(path.parent, options.recipe, path.name)  # refuses a name that `tba train` would
        recipe = override(find(options.recipe), overrides, f"tba import {path} --recipe {options.recipe}")
        refuse_files(recipe, files)
        recipe, decided_overrides = with_weights(recipe, overrides, view.say)
        run = prepare_run(path, options.recipe, decided_overrides, recipe)
    elif overrides:
        raise UserError(f"tba import takes fields such as {overrides[0]} for a new run only: give --recipe NAME too")
    else:
        run = RunDirectory.open(path)
        recipe = run.recipe_to_read(options.trust)
        refuse_files(recipe, files)
        if (loss := loss_of(run, run.journal(recipe))) is not None:
            raise UserError(f"{loss}; put it back if there is a copy, or resume with --accept-lost-rows first")
    try:
        import_answers(recipe, run, files, view.say, options.source, options.rewards == "claimed", options.max_tokens)
    except UserError:
        if options.recipe is not None:
            with JournalFollower(run.journal(recipe)) as journal:
                if not journal.totals().rows:  # nothing was imported: the same command can be given again
                    (path / "recipe.json").unlink()
        raise
    if options.recipe is not None:
        words = ["tba", "train", options.recipe, "--runs", str(path.parent), "--run-name", path.name, *overrides]
        console.print(f"start it with: {shlex.join(words)} [--offline]", highlight=False, soft_wrap=True, markup=False)
    return 0
