"""A recipe from the command line: found by name or path, its fields set by dotted name.

Invariant: what a field *is* (which task, which objective) is decided by the recipe's code; the command line sets the
values inside. Anything it cannot take ends in one sentence and exit code 2.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from tba.errors import UserError
from tba.fields import help_of, make_recorded, parse_fields, refuse_without_effect, replace_fields, with_new_flags
from tba.recipe import Recipe
from tba.recipe_names import VARIANT_MARK, require_recipe_name

T = TypeVar("T")
LEADING_FLAGS = (  # of the fields that are set most: a recipe's help begins with them
    *("--steps", "--seed", "--model.path", "--model.generation.max-completion-tokens", "--optimizer.lr"),
    *("--objective.beta.value", "--objective.beta.start", "--objective.beta.end", "--groups-per-step", "--group-size"),
    *("--searchers", "--sync-every", "--replay.selection.m", "--evaluation.problems", "--runtime"),
)
_files_being_loaded: list[Path] = []


def find(name: str) -> Recipe:
    """Returns the recipe of a name (`quickstart`), of a path to a Python file that defines `recipe`, or of a variant
    of the `study` that a file defines (FILE.py::VARIANT).
    """
    file, mark, variant = name.partition(VARIANT_MARK)
    if mark:
        recipe: Recipe = load_definition(Path(file), "study").recipe_of(variant)
        return recipe
    return _recipe_in(module_of(name), name)


def load_definition(path: Path, name: str) -> Any:
    """Returns what a Python file defines under a name. Raises `UserError` where it does not define that."""
    definition = getattr(_load_file(path, name), name, None)
    if definition is None:
        raise UserError(f"{path} defines no `{name}`: give the path of a Python file that does")
    return definition


def module_of(name: str) -> ModuleType:
    """Returns the module that defines a recipe: one of those shipped, by name, or a file's."""
    if name.endswith(".py"):
        return _load_file(Path(name), "recipe")
    require_recipe_name(name)
    return importlib.import_module(f"tba.recipes.{name}")


def _load_file(path: Path, kind: str) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"there is no {kind} file {path}: give the path of a Python file that defines `{kind}`")
    name = f"tba_user_{kind}_{path.stem}"
    is_recorded = path.name == "recipe.py" and (path.parent / "recipe.json").is_file()  # a run, maybe earlier, wrote it
    loader = _RecordedLoader(name, str(path)) if is_recorded else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be read as a Python module: give a .py file that defines `{kind}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look their module up
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # so that it can import its neighbours; last, so that none of them hides a library
    _files_being_loaded.append(path)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{_place_of(error, path)}: {type(error).__name__}: {error}; fix the {kind} there") from error
    finally:
        _files_being_loaded.pop()
    return module


class _RecordedLoader(SourceFileLoader):
    """Loads the recipe that a run has written: its calls may name fields by their old names."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.keywords:
                node.args.insert(0, node.func)
                node.func = ast.copy_location(ast.Name("make_recorded", ast.Load()), node)
        code: CodeType = self.source_to_code(tree, self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["make_recorded"] = make_recorded
        super().exec_module(module)


def file_being_loaded() -> Path | None:
    """Returns the file of a recipe or a study that is being loaded now, or None."""
    return _files_being_loaded[-1] if _files_being_loaded else None


def _place_of(error: BaseException, path: Path) -> str:
    """Returns the line of a user's file that raised the error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno or 1}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _recipe_in(module: Any, place: str) -> Recipe:
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise UserError(f"{place} defines no `recipe = Recipe(...)`: `tba example my_task` writes a file that does")
    return recipe


def override(default: T, arguments: Sequence[str], program: str, recorded: bool = False) -> T:
    """Returns `default` with fields set from `--dotted.name value` arguments. Raises `UserError` for what does not fit.

    recorded: the arguments are those of an existing run or come from another part of the program. Then they may set
    fields without effect, and those that are for code to set.
    """
    if not arguments:
        return default
    if recorded:
        arguments = with_new_flags(arguments, default)
    help_flags = {"--help", "-h"} & set(arguments)
    values = parse_fields([a for a in arguments if a not in help_flags], default, program, by_code=recorded)
    settings = with_fields(default, [(field.flag, value) for field, value in values])
    if help_flags:
        sys.stdout.write(f"{help_of(settings, LEADING_FLAGS if isinstance(settings, Recipe) else ())}\n")
        raise SystemExit(0)
    if not recorded:
        refuse_without_effect(settings, (field.flag for field, _ in values), program)
    return settings


def with_fields(settings: T, values: Sequence[tuple[str, Any]]) -> T:
    """Returns the settings with fields set to values, each a (flag, value); the last one of a flag counts.

    A learning-rate schedule is lengthened to the given `--steps`, unless the schedule is set itself. It is never
    shortened: a run of fewer steps is the beginning of the whole one.
    """
    lengthened = _lengthen_schedule(settings, values) if isinstance(settings, Recipe) else settings
    updated_settings: T = replace_fields(lengthened, dict(values))
    return updated_settings


def words_of(flag: str, value: Any) -> list[str]:
    """Returns the words of a command line that set a field."""
    if isinstance(value, bool):
        place, dot, name = flag.removeprefix("--").rpartition(".")
        return [flag if value else f"--{place}{dot}no-{name}"]
    return [flag, *map(str, value)] if isinstance(value, list | tuple) else [flag, str(value)]


def keep_last_values(words: Sequence[str]) -> list[str]:
    """Returns a command line in which each field is set once, by the last words that set it."""
    words_by_field: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = _field_name(word)
            words_by_field.pop(name, None)
        words_by_field.setdefault(name, []).append(word)
    return [word for field_words in words_by_field.values() for word in field_words]


def _field_name(argument: str) -> str:
    """Returns the dotted name of the field that an argument sets or switches off; empty: it is no flag."""
    name = argument.partition("=")[0].replace("-", "_")
    return re.sub(r"(^|\.)no_(?=[^.]*$)", r"\1", name[2:]) if argument.startswith("--") else ""


def _lengthen_schedule(recipe: Recipe, values: Sequence[tuple[str, Any]]) -> Recipe:
    schedule = recipe.optimizer.schedule
    if schedule.planned is None or any(flag.startswith("--optimizer.schedule") for flag, _ in values):
        return recipe
    steps = max((int(v) for flag, v in values if flag == "--steps" and isinstance(v, int | float)), default=0)
    if steps <= schedule.planned:
        return recipe
    return replace(recipe, optimizer=replace(recipe.optimizer, schedule=schedule.lasting(steps)))
