"""A recipe from the command line: found by name or path, its fields set by dotted name.

Invariant: what a field *is* (which task, which objective) is decided by the recipe's code; the command line sets the
values inside. Anything it cannot take ends in one sentence and exit code 2.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tba.errors import UserError
from tba.fields import given, help_of, refuse_without_effect, replaced
from tba.recipe import Recipe
from tba.shipped import VARIANT_MARK, require_shipped

T = TypeVar("T")
FIRST = (  # the fields that are set most: a recipe's help begins with them
    *("--steps", "--seed", "--model.path", "--model.generation.max-completion-tokens", "--optimizer.lr"),
    *("--objective.beta.value", "--objective.beta.start", "--objective.beta.end", "--groups-per-step", "--group-size"),
    *("--searchers", "--sync-every", "--replay.selection.m", "--evaluation.problems", "--runtime"),
)
_being_loaded: list[Path] = []


def find(name: str) -> Recipe:
    """Returns the recipe of a name (`quickstart`), of a path to a Python file that defines `recipe`, or of a variant
    of the `study` that a file defines (FILE.py::VARIANT).
    """
    file, mark, variant = name.partition(VARIANT_MARK)
    if mark:
        recipe: Recipe = defined(Path(file), "study").recipe_of(variant)
        return recipe
    return _recipe_in(module_of(name), name)


def defined(path: Path, what: str) -> Any:
    """Returns what a Python file calls `what`. Raises `UserError` where it does not define that."""
    found = getattr(_from_file(path, what), what, None)
    if found is None:
        raise UserError(f"{path} defines no `{what}`: give the path of a Python file that does")
    return found


def module_of(name: str) -> ModuleType:
    """Returns the module that defines a recipe: one of those shipped, by name, or a file's."""
    if name.endswith(".py"):
        return _from_file(Path(name), "recipe")
    require_shipped(name)
    return importlib.import_module(f"tba.recipes.{name}")


def _from_file(path: Path, kind: str) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"there is no {kind} file {path}: give the path of a Python file that defines `{kind}`")
    spec = importlib.util.spec_from_file_location(f"tba_user_{kind}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be read as a Python module: give a .py file that defines `{kind}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look their module up
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # so that it can import its neighbours; last, so that none of them hides a library
    _being_loaded.append(path)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{_place(error, path)}: {type(error).__name__}: {error}; fix the {kind} there") from error
    finally:
        _being_loaded.pop()
    return module


def being_loaded() -> Path | None:
    """Returns the file of a recipe or a study that is being loaded now; None where none is."""
    return _being_loaded[-1] if _being_loaded else None


def _place(error: BaseException, path: Path) -> str:
    """Returns where in a user's file the error is."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno or 1}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _recipe_in(module: Any, where: str) -> Recipe:
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise UserError(f"{where} defines no `recipe = Recipe(...)`: `tba example my_task` writes a file that does")
    return recipe


def override(default: T, arguments: Sequence[str], program: str, recorded: bool = False) -> T:
    """Returns `default` with fields set from `--dotted.name value` arguments. Raises `UserError` for what does not fit.

    recorded: the arguments are those of an existing run or come from another part of the program. Then they may set
    fields without effect, and those that are for code to set.
    """
    if not arguments:
        return default
    asked = {"--help", "-h"} & set(arguments)
    found = given([a for a in arguments if a not in asked], default, program, by_code=recorded)
    made = with_fields(default, [(field.flag, value) for field, value in found])
    if asked:
        sys.stdout.write(f"{help_of(made, FIRST if isinstance(made, Recipe) else ())}\n")
        raise SystemExit(0)
    if not recorded:
        refuse_without_effect(made, (field.flag for field, _ in found), program)
    return made


def with_fields(settings: T, values: Sequence[tuple[str, Any]]) -> T:
    """Returns the settings with fields set: (flag, value), of a flag that comes more than once the last.

    A learning-rate schedule becomes as long as the given `--steps`, unless the schedule is set itself: a run of fewer
    steps is the beginning of the whole one.
    """
    begun = _lasting(settings, values) if isinstance(settings, Recipe) else settings
    made: T = replaced(begun, dict(values))
    return made


def words_of(flag: str, value: Any) -> list[str]:
    """Returns the words of a command line that set a field."""
    if isinstance(value, bool):
        place, dot, name = flag.removeprefix("--").rpartition(".")
        return [flag if value else f"--{place}{dot}no-{name}"]
    return [flag, *map(str, value)] if isinstance(value, list | tuple) else [flag, str(value)]


def newest_of_each(words: Sequence[str]) -> list[str]:
    """Returns a command line with each field set once, by the last words that set it."""
    last: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = _field_named(word)
            last.pop(name, None)
        last.setdefault(name, []).append(word)
    return [word for own in last.values() for word in own]


def _field_named(argument: str) -> str:
    """Returns the dotted name of the field that an argument sets, also for switches that are turned off; or ""."""
    name = argument.partition("=")[0].replace("-", "_")
    return re.sub(r"(^|\.)no_(?=[^.]*$)", r"\1", name[2:]) if argument.startswith("--") else ""


def _lasting(recipe: Recipe, values: Sequence[tuple[str, Any]]) -> Recipe:
    shape = recipe.optimizer.schedule
    if shape.planned is None or any(flag.startswith("--optimizer.schedule") for flag, _ in values):
        return recipe
    steps = max((int(v) for flag, v in values if flag == "--steps" and isinstance(v, int | float)), default=0)
    if steps <= shape.planned:
        return recipe
    return dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, schedule=shape.lasting(steps)))
