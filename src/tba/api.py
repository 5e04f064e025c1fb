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
from tba.record.terminal import Displayable
from tba.settings import file_being_loaded, find, override, with_fields, words_of
from tba.types import Evaluation, Json, Trajectory

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tba.record.summary import Summary
    from tba.runs.estimate import Estimate

_CHUNK_ROWS = 512  # trajectories in memory


@dataclass(frozen=True, repr=False)
class Run(Displayable):
    """Gives access to a run on disk, in progress or ended. Each property reads its files anew."""

    path: Path  # its folder, such as runs/NAME

    def _content(self) -> RenderableType:
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

        checkpoint = newest_checkpoint(self.path / "checkpoints")
        return None if checkpoint is None else checkpoint.path

    def metrics(self) -> Sequence[Mapping[str, Json]]:
        """Returns one mapping for each optimizer step (docs/run.md says what is in it)."""
        from tba.record.metrics import read_metrics

        return read_metrics(self.path)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yields all trajectories that searchers have sent and that are still on disk, oldest first."""
        from tba.replay.follower import JournalFollower
        from tba.replay.reading import JournalFile
        from tba.runtime.run_directory import RunDirectory

        path = RunDirectory.open(self.path).journal_to_read()
        with JournalFile(path) as file, JournalFollower(path, file=file) as journal:
            while chunk := journal.drain(_CHUNK_ROWS):
                yield from chunk


def load_recipe(name: str) -> Recipe:
    """Returns the recipe of a name (`"quickstart"`), or the one that a Python file defines, by its path."""
    return find(name)


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
        fields["steps"] = steps_in(_resolve(recipe, fields)[0], epochs)
    resolved_recipe, name, overrides = _resolve(recipe, fields)
    path = new_path(Path(runs), resolved_recipe.name, run_name)
    view = View(terminal(quiet=quiet))
    for warning in validate(resolved_recipe):
        view.say(f"note: {warning}")
    if not name:
        name, overrides = _write_recipe_file(resolved_recipe, path), []
    run, *_ = carry_out(resolved_recipe, name, overrides, path, view, callbacks=Callbacks(on_step, on_evaluation))
    return Run(run.path)


def check(recipe: Recipe | str, **fields: Any) -> Estimate:
    """Estimates the time and memory that a recipe will take here, from a few rounds and steps; nothing is learnt.

    Raises `UserError` for what cannot run, and for a recipe of classes or functions that other processes cannot import,
    since searcher and trainer are measured in processes of their own. Takes a quarter of a minute for the quickstart.
    """
    from tba.runs.estimate import estimate
    from tba.runs.validating import validate

    resolved_recipe, name, overrides = _resolve(recipe, fields)
    validate(resolved_recipe)
    with tempfile.TemporaryDirectory() as folder:
        if not name:
            name, overrides = str(Path(folder) / "recipe.py"), []
            try:
                write_recipe(resolved_recipe, Path(name))
            except UserError as error:
                raise UserError(
                    f"{resolved_recipe.name} cannot be checked from here: its searcher and its trainer are measured in "
                    f"other processes, which have to import what it is made of; put that into a .py file ({error})"
                ) from error
        return estimate(resolved_recipe, name, overrides)


def evaluate(
    recipe: Recipe | str, checkpoint: str | Path | None = None, *, split: str = "eval", **fields: Any
) -> Sequence[Evaluation]:
    """Measures the accuracy of a model on a recipe's problems: greedy, sampled, pass@k, as the recipe's `evaluation`
    asks.

    checkpoint: a folder in the Hugging Face layout, a run (its newest checkpoint) or a Hub name; None: the recipe's own
    model. split: `"eval"`, held out, or `"train"`. Raises `UserError` for what cannot be evaluated.
    """
    from tba.runs.evaluating import assess_recipe, with_checkpoint

    resolved_recipe, _, _ = _resolve(recipe, fields)
    resolved_recipe = with_checkpoint(resolved_recipe, None if checkpoint is None else str(checkpoint))
    return assess_recipe(resolved_recipe, split, resolved_recipe.evaluation)[0].evaluations


def _resolve(recipe: Recipe | str, fields: Mapping[str, Any]) -> tuple[Recipe, str, list[str]]:
    """Returns the recipe with the fields set, its name or path, and the fields as words of a command line.

    The name is empty for a recipe that a command line cannot express: an object, or one with a field set to an object.
    Raises `UserError` for a field that the recipe does not have.
    """
    if (file := file_being_loaded()) is not None:
        raise UserError(
            f"{file} trains, checks or evaluates while it is loaded, and other processes load it too: put that below "
            '`if __name__ == "__main__":`'
        )
    base = find(recipe) if isinstance(recipe, str) else recipe
    known_flags = {field.flag for field in fields_of(base, by_code=True)}
    values = {}
    for written_name, value in _flatten(fields):
        name = written_name.replace("-", "_")
        if name == "model" and isinstance(value, str | Path) and isinstance(base.model, LoadedFromPath):
            name = "model.path"  # a folder or a Hub name, with the recipe's other settings
        flag = f"--{name.replace('_', '-')}"
        if flag not in known_flags and not _has_field(base, name):
            # `given` raises an error that suggests similar names
            parse_fields([flag], base, f"tba train {recipe if isinstance(recipe, str) else 'RECIPE'}", by_code=True)
        values[flag] = value
    resolved_recipe = with_fields(base, list(values.items()))
    if not isinstance(recipe, str) or values.keys() - known_flags:
        return resolved_recipe, "", []
    words = [word for flag, value in values.items() for word in words_of(flag, value)]
    override(base, words, "tba.train")  # refuses what a resume of the run could not read from these words
    return resolved_recipe, recipe, words


def _flatten(fields: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a nested mapping by dotted name: `optimizer={"lr": 1e-5}` is `optimizer.lr`."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def _has_field(recipe: Recipe, name: str) -> bool:
    """Returns whether the recipe, or settings in it, have a field of that dotted name."""
    *places, field_name = name.split(".")
    settings: Any = recipe
    for place in places:
        settings = getattr(settings, place, None)
    return is_dataclass(settings) and field_name in {f.name for f in dataclass_fields(settings)}


def _write_recipe_file(recipe: Recipe, folder: Path) -> str:
    """Writes the file from which other processes rebuild a recipe object, and returns its path. In the inline runtime,
    which has no other processes, a recipe that cannot be rebuilt gets a file that raises an error.

    Nothing is written where the recipe is refused, or where the folder has a run already.
    """
    if (folder / "recipe.json").exists():
        raise UserError(f"{folder} holds a run already: choose another run_name, or remove it")
    with tempfile.TemporaryDirectory() as temporary_folder:
        path = Path(temporary_folder) / "recipe.py"
        try:
            write_recipe(recipe, path)
        except UserError:
            if recipe.runtime != "inline":
                raise
            path.write_text(f"raise RuntimeError({f'the recipe {recipe.name} was made where it ran, inline'!r})\n")
        folder.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(path, folder / "recipe.py"))
