"""The functions that a script or a notebook calls: `tba.train`, `tba.check`, `tba.evaluate`, `tba.open_run`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.errors import UserError
from tba.fields import fields_of, parse_fields
from tba.protocols import LoadedFromPath
from tba.recipe import Recipe
from tba.recipe_source import write_recipe
from tba.record.terminal import Shown
from tba.settings import file_being_loaded, find, override, with_fields, words_of
from tba.types import Evaluation, Json, Trajectory

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tba.record.summary import Summary
    from tba.runs.estimate import Estimate

_AT_ONCE = 512  # trajectories in memory


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """Gives access to a run on disk, in progress or ended. Everything is read when it is asked for."""

    path: Path  # its folder, such as runs/NAME

    def _shown(self) -> RenderableType:
        from tba.record.run_record import RunRecord
        from tba.record.show import brief

        try:
            return brief(RunRecord.read(self.path))
        except UserError as error:  # its folder has been removed
            return str(error)

    @property
    def summary(self) -> Summary | None:
        """Returns the run's results: held-out figures, seconds, shares, lag, faults. None before it has ended."""
        from tba.record.summary import Summary

        return Summary.read(self.path)

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """Returns the held-out figures in the order they were made."""
        from tba.record.run_record import RunRecord

        return RunRecord.read(self.path).evaluations

    @property
    def model(self) -> Path | None:
        """Returns the folder of the newest checkpoint, in the Hugging Face layout; None before the first."""
        from tba.training.checkpoint import newest_checkpoint

        newest = newest_checkpoint(self.path / "checkpoints")
        return None if newest is None else newest.path

    def metrics(self) -> Sequence[Mapping[str, Json]]:
        """Returns one mapping for each optimizer step (docs/run.md says what is in it)."""
        from tba.record.metrics import read_metrics

        return read_metrics(self.path)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yields all trajectories that searchers have sent and that are still on disk, oldest first."""
        from tba.replay.follower import JournalFollower
        from tba.replay.reading import JournalFile
        from tba.runtime.run_directory import RunDirectory

        path = RunDirectory.open(self.path).journal_there()
        with JournalFile(path) as file, JournalFollower(path, file=file) as journal:
            while chunk := journal.drain(_AT_ONCE):
                yield from chunk


def open_run(path: str | Path) -> Run:
    """Opens the run in a folder. Raises `UserError` when there is none."""
    from tba.runtime.run_directory import RunDirectory

    return Run(RunDirectory.open(Path(path)).path)


def train(
    recipe: Recipe | str,
    *,
    runs: str | Path = "runs",
    run_name: str | None = None,
    quiet: bool = False,
    epochs: float | None = None,
    on_step: Callable[[Mapping[str, Json]], object] | None = None,
    on_evaluation: Callable[[Evaluation], object] | None = None,
    **fields: Any,
) -> Run:
    """Trains, and returns when the run has ended. Raises `UserError` for what cannot run, before anything is made.

    recipe: an object, a name (`"quickstart"`) or the path of a file that defines one. fields: values of its own fields
    (`steps=50`, `seed=1`, `model="folder"`), nested ones in a dictionary or by dotted name (`optimizer={"lr": 1e-5}`,
    `**{"optimizer.lr": 1e-5}`); setting `steps` adjusts the lengths of schedules. A recipe object is
    trained as it is, in any runtime: other processes rebuild it from `recipe.py` in the run's folder. What they cannot
    rebuild (a class defined in a notebook) trains with `runtime="inline"` only, and is refused otherwise. A script must
    call this below `if __name__ == "__main__":`, as with `multiprocessing`.

    epochs: how long the run is as passes over the training prompts, in the place of `steps`. on_step, on_evaluation:
    plain functions, called here with each optimizer step's metrics (as `Run.metrics` gives them) and with each held-out
    figure, once they are recorded; what they raise ends the run, which can be resumed.

    After Ctrl-C the run is left intact, with a checkpoint; `tba resume` continues it.
    """
    from tba.record.callbacks import Callbacks
    from tba.record.live import View
    from tba.record.terminal import terminal
    from tba.runs.running import carry_out, steps_in
    from tba.runs.validating import validate
    from tba.runtime.run_directory import new_path

    if epochs is not None:
        if "steps" in fields:
            raise UserError("epochs and steps both say how long the run is: give one of them")
        fields["steps"] = steps_in(_found(recipe, fields)[0], epochs)
    resolved_recipe, name, overrides = _found(recipe, fields)
    path = new_path(Path(runs), resolved_recipe.name, run_name)
    view = View(terminal(quiet=quiet))
    for warning in validate(resolved_recipe):
        view.say(f"note: {warning}")
    if not name:
        name, overrides = _written(resolved_recipe, path), []
    run, *_ = carry_out(resolved_recipe, name, overrides, path, view, callbacks=Callbacks(on_step, on_evaluation))
    return Run(run.path)


def check(recipe: Recipe | str, **fields: Any) -> Estimate:
    """Estimates the time and memory that a recipe will take here, from a few rounds and steps; nothing is learnt.

    Raises `UserError` for what cannot run, and for a recipe of classes or functions that other processes cannot import,
    since searcher and trainer are measured in processes of their own. Takes a quarter of a minute for the quickstart.
    """
    from tba.runs.estimate import estimate
    from tba.runs.validating import validate

    found, name, overrides = _found(recipe, fields)
    validate(found)
    with tempfile.TemporaryDirectory() as folder:
        if not name:
            name, overrides = str(Path(folder) / "recipe.py"), []
            try:
                write_recipe(found, Path(name))
            except UserError as error:
                raise UserError(
                    f"{found.name} cannot be checked from here: its searcher and its trainer are measured in other "
                    f"processes, which have to import what it is made of; put that into a .py file ({error})"
                ) from error
        return estimate(found, name, overrides)


def evaluate(
    recipe: Recipe | str, checkpoint: str | Path | None = None, *, split: str = "eval", **fields: Any
) -> Sequence[Evaluation]:
    """Measures the accuracy of a model on a recipe's problems: greedy, sampled, pass@k, as the recipe's `evaluation`
    asks.

    checkpoint: a folder in the Hugging Face layout, a run (its newest checkpoint) or a Hub name; None: the recipe's own
    model. split: `"eval"`, held out, or `"train"`. Raises `UserError` for what cannot be evaluated.
    """
    from tba.runs.evaluating import measured, with_checkpoint

    found, _, _ = _found(recipe, fields)
    found = with_checkpoint(found, None if checkpoint is None else str(checkpoint))
    return measured(found, split, found.evaluation)[0].evaluations


def _found(recipe: Recipe | str, fields: Mapping[str, Any]) -> tuple[Recipe, str, list[str]]:
    """Returns the recipe with the fields set; its name or path and the fields as on a command line, if these suffice.

    The name is empty for a recipe that they cannot express (an object, or one with a field set to an object). Raises
    `UserError` for a field that the recipe does not have.
    """
    if (file := file_being_loaded()) is not None:
        raise UserError(
            f"{file} trains, checks or evaluates while it is loaded, and other processes load it too: put that below "
            '`if __name__ == "__main__":`'
        )
    begun = find(recipe) if isinstance(recipe, str) else recipe
    known = {field.flag for field in fields_of(begun, by_code=True)}
    values = {}
    for given_name, value in _flat(fields):
        name = given_name.replace("-", "_")
        if name == "model" and isinstance(value, str | Path) and isinstance(begun.model, LoadedFromPath):
            name = "model.path"  # a folder or a Hub name, with the recipe's other settings
        flag = f"--{name.replace('_', '-')}"
        if flag not in known and not _has(begun, name):
            # this says that there is none, and what may be meant
            parse_fields([flag], begun, f"tba train {recipe if isinstance(recipe, str) else 'RECIPE'}", by_code=True)
        values[flag] = value
    made = with_fields(begun, list(values.items()))
    if not isinstance(recipe, str) or values.keys() - known:
        return made, "", []
    words = [word for flag, value in values.items() for word in words_of(flag, value)]
    override(begun, words, "tba.train")  # what resumes the run reads these: it is refused here or nowhere
    return made, recipe, words


def _flat(fields: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a nested mapping by dotted name: `optimizer={"lr": 1e-5}` is `optimizer.lr`."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def _has(recipe: Recipe, name: str) -> bool:
    """Returns whether the recipe, or settings in it, have a field of that dotted name."""
    *places, last = name.split(".")
    settings: Any = recipe
    for place in places:
        settings = getattr(settings, place, None)
    return is_dataclass(settings) and last in {f.name for f in dataclass_fields(settings)}


def _written(recipe: Recipe, folder: Path) -> str:
    """Writes the file from which other processes make a recipe object; in the inline runtime, one that says there are
    none.

    Nothing is written where the recipe is refused, or where the folder has a run already.
    """
    if (folder / "recipe.json").exists():
        raise UserError(f"{folder} holds a run already: choose another run_name, or remove it")
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "recipe.py"
        try:
            write_recipe(recipe, path)
        except UserError:
            if recipe.runtime != "inline":
                raise
            path.write_text(f"raise RuntimeError({f'the recipe {recipe.name} was made where it ran, inline'!r})\n")
        folder.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(path, folder / "recipe.py"))
