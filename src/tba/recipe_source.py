"""Writes a recipe object as Python source from which another process rebuilds it: nothing is pickled.

Invariant: the source names classes and functions by their modules and writes values out, so that it can be read, kept
and run later; it makes an equal recipe, or the recipe is refused.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tba.errors import UserError
from tba.recipe import Recipe, differences, settings_json
from tba.settings import find

_HEAD = '"""The recipe of this run, as it was given to tba.train."""\n\n'


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the source of `recipe`, from which `find` rebuilds it.

    Raises `UserError` for what other processes could not rebuild: classes and functions defined in a notebook or within
    functions, open files, loaded models.
    """
    writer = _Writer()
    expression = writer.expression(recipe, "the recipe")
    imports = "".join(f"import {module}\n" for module in sorted(writer.modules))
    file_lines = "".join(f"{name} = tba.settings.module_of({file!r})\n" for file, name in writer.files.items())
    path.write_text(f"{_HEAD}{imports}\n{file_lines}recipe = {expression}\n")
    for name, value, rebuilt in differences(settings_json(recipe), settings_json(find(str(path)))):
        if str(value).startswith("__main__.") and str(value).rpartition(".")[2] == str(rebuilt).rpartition(".")[2]:
            continue  # a function of the running script, which is another module where it is loaded
        raise UserError(
            f"{recipe.name}: {name} is {value}, and would be {rebuilt} in another process: put what it is made "
            'of into fields of a dataclass, or train with runtime="inline"'
        )


class _Writer:
    """Writes expressions, and collects the modules that they name and the user's files that stand for modules."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.files: dict[str, str] = {}

    def expression(self, value: Any, place: str) -> str:
        """Returns `value` as an expression; `place` names it in errors."""
        if value is None or (isinstance(value, bool | int | str | bytes) and not isinstance(value, Enum)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, Enum):
            return f"{self.name_of(type(value), place)}.{value.name}"
        if isinstance(value, Path):
            self.modules.add("pathlib")
            return f"pathlib.Path({str(value)!r})"
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return self.name_of(value, place)
        if dataclasses.is_dataclass(value):
            field_values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            arguments = ", ".join(f"{name}={self.expression(v, f'{place}.{name}')}" for name, v in field_values.items())
            return f"{self.name_of(type(value), place)}({arguments})"
        if isinstance(value, Mapping):
            pairs = (f"{self.expression(k, place)}: {self.expression(v, f'{place}[{k!r}]')}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
        if isinstance(value, list | tuple | set | frozenset):
            items = ", ".join(self.expression(v, place) for v in value)
            opening, closing = {list: "[]", tuple: ("(", ",)" if value else ")"), set: "{}"}.get(type(value), ("", ""))
            return f"{opening}{items}{closing}" if opening else f"frozenset({{{items}}})" if value else "frozenset()"
        raise UserError(
            f"{place} is {value!r}, which other processes cannot make: use a dataclass of an importable module in its "
            'place, or train with runtime="inline"'
        )

    def name_of(self, target: Any, place: str) -> str:
        """Returns the name of a class or function, by the module or the file that defines it."""
        module, name = target.__module__, target.__qualname__
        if "<" in name:
            raise UserError(
                f"{place} is {name}, made within a function or a lambda, which other processes cannot find: define it "
                'at the top of a module, or train with runtime="inline"'
            )
        file = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" or module.startswith("tba_user_"):
            if file is None or not Path(file).is_file():
                raise UserError(
                    f"{place} is {name} of a notebook or a prompt, which other processes cannot import: put it into a "
                    'file and import that, or train with runtime="inline"'
                )
            self.modules.add("tba.settings")
            alias = self.files.setdefault(str(Path(file).resolve()), f"script{len(self.files) or ''}")
            return f"{alias}.{name}"
        self.modules.add(module)
        return f"{module}.{name}"
