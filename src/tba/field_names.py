"""The names of a recipe's fields, read from its source: a mistyped flag is refused before anything is loaded.

A recipe imports torch and a model library, which takes seconds. The names of its fields follow from the source of the
file and of the classes that it names, of which nothing is executed here.

Invariant: a name that is refused here is one that the loaded recipe would refuse too. Where the source alone does not
tell (the result of a function, a class with a decorator of its own) any name may be right, and the loaded recipe
decides.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from tba.recipe_names import VARIANT_MARK

Names: TypeAlias = "Mapping[str, Names] | None"  # of a value's fields, each with the names inside it; {}: none, a
# command line can spell the value; None: the source does not tell

_PACKAGE = Path(__file__).parent
_SPELLED = {"str", "int", "float", "bool", "Path", "None"}  # types of values that a command line can spell
_BASES_WITHOUT_FIELDS = {"Protocol", "Generic", "ABC", "object"}
_DECORATORS = {"dataclass", "as_declared"}
_PLAIN = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.JoinedStr, ast.Compare)
_VALUE: Names = {}


def of_recipe(name: str) -> Names:
    """Returns the fields of a recipe by its name or path, or by the folder of a run. Of a variant of a study they are
    those that every recipe has.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        name = str(json.loads((Path(name) / "recipe.json").read_bytes())["recipe"])
    if VARIANT_MARK in name:
        return of_any_recipe()
    return _names_in(Path(name) if name.endswith(".py") else _PACKAGE / "recipes" / f"{name}.py", "recipe")


def of_any_recipe() -> Names:
    """Returns the fields that every recipe has, without the names inside their values."""
    names = of_class("recipe.Recipe")
    return names and {name: _VALUE if inner == _VALUE else None for name, inner in names.items()}


def of_class(place: str) -> Names:
    """Returns the fields of one of this package's settings classes, by module within the package."""
    module, _, name = place.rpartition(".")
    return of_class_in(_PACKAGE / f"{module.replace('.', '/')}.py", name)


def of_class_in(path: Path, name: str) -> Names:
    """Returns the fields of a settings class that a file defines."""
    return _names_in(path, f"{name}()")


def has(names: Names, flag: str) -> bool:
    """Returns whether there may be a field that the flag sets, or switches off."""
    *parents, name = _dashed(flag.removeprefix("--")).split(".")
    for parent in parents:
        if names is None:
            return True
        if parent not in names:
            return False
        names = names[parent]
    return names is None or name in names or name.removeprefix("no-") in names


def flags_of(names: Names, prefix: str = "--") -> Iterator[str]:
    """Yields the flags of the fields that a command line can spell."""
    for name, inner in (names or {}).items():
        if inner == _VALUE:
            yield prefix + name
        yield from flags_of(inner, f"{prefix}{name}.")


def _names_in(path: Path, expression: str) -> Names:
    try:
        return _Module(path).names_of(ast.parse(expression, mode="eval").body)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # whoever loads the file says what is wrong
        return None


@dataclass(frozen=True)
class _Class:
    """A class of settings in the source: its fields, in the order of its arguments."""

    fields: Mapping[str, tuple[ast.expr, ast.expr | None, _Module]]  # name -> type, default, and their module


class _Module:
    """A module's source, with the meaning of each name at its top."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meanings = _meanings(path)

    def names_of(self, node: ast.expr) -> Names:
        """Returns the names of the fields of an expression's value."""
        if isinstance(node, _PLAIN):
            return _VALUE
        if isinstance(node, ast.Attribute) and isinstance(names := self._names_of_owner(node), Mapping):
            return names.get(_dashed(node.attr))
        if isinstance(node, ast.Call):
            return self._names_of_call(node)
        module, meaning = self.resolve(node)
        return module.names_of(meaning) if isinstance(meaning, ast.expr) else None

    def resolve(self, node: ast.AST | None) -> tuple[_Module, ast.AST | None]:
        """Returns the module that defines a name, or a name in a module, and the name's meaning there."""
        if isinstance(node, ast.Name):
            return self._definition_of(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            meaning = self.meanings.get(node.value.id)
            if isinstance(meaning, ast.Import) and (module := self._import(_module_named(meaning, node.value.id))):
                return module._definition_of(node.attr)
        return self, None

    def _definition_of(self, name: str) -> tuple[_Module, ast.AST | None]:
        meaning = self.meanings.get(name)
        if not isinstance(meaning, ast.ImportFrom):
            return self, meaning
        module = self._import(meaning.module) if not meaning.level else None
        original = next(alias.name for alias in meaning.names if (alias.asname or alias.name) == name)
        return module._definition_of(original) if module else (self, None)

    def _import(self, name: str | None) -> _Module | None:
        """Returns a module of this package, or a neighbour of a user's file that no installed module hides."""
        package, _, submodule = (name or "").partition(".")
        if package == "tba":
            path = _PACKAGE / submodule.replace(".", "/") if submodule else _PACKAGE
            return _Module(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        neighbour = self.path.parent / f"{package}.py"
        if submodule or not neighbour.is_file():
            return None
        spec = importlib.util.find_spec(package)
        return None if spec and spec.origin != str(neighbour.resolve()) else _Module(neighbour)

    def _names_of_owner(self, node: ast.Attribute) -> Names:
        """Returns the names of the settings that have an attribute; None: a module has it."""
        is_module = isinstance(node.value, ast.Name) and isinstance(self.meanings.get(node.value.id), ast.Import)
        return None if is_module else self.names_of(node.value)

    def _names_of_call(self, node: ast.Call) -> Names:
        if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        module, function = self.resolve(node.func)
        if _last_name(node.func) == "replace" and len(node.args) == 1 and function is None:  # of dataclasses
            return self._names_after_replace(self.names_of(node.args[0]), node.keywords)
        return self._names_of_settings(node, module, function) if isinstance(function, ast.ClassDef) else None

    def _names_after_replace(self, names: Names, changes: Sequence[ast.keyword]) -> Names:
        if names is None:
            return None
        new_names: dict[str, Names] = dict(names)
        for change in changes:
            name, inner_names = _dashed(str(change.arg)), self.names_of(change.value)
            new_names[name] = _VALUE if names.get(name) == _VALUE else None if inner_names == _VALUE else inner_names
        return new_names

    def _names_of_settings(self, node: ast.Call, module: _Module, definition: ast.ClassDef) -> Names:
        """Returns the names of settings that are made by calling their class."""
        settings = module._class_of(definition)
        if settings is None:
            return None
        arguments = dict(zip(settings.fields, node.args, strict=False))
        arguments |= {str(keyword.arg): keyword.value for keyword in node.keywords}
        names: dict[str, Names] = {}
        for name, (kind, default, home) in settings.fields.items():
            inner_names = self.names_of(arguments[name]) if name in arguments else home._names_of_default(default)
            names[_dashed(name)] = _VALUE if home._is_spelled(kind) else None if inner_names == _VALUE else inner_names
        return names

    def _names_of_default(self, default: ast.expr | None) -> Names:
        if default is None:
            return None
        if not isinstance(default, ast.Call) or _last_name(default.func) != "field":
            return self.names_of(default)
        arguments = {keyword.arg: keyword.value for keyword in default.keywords}
        factory = arguments.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return self.names_of(factory.body)
        if factory is not None:
            return self.names_of(ast.Call(factory, [], []))
        return self.names_of(arguments["default"]) if "default" in arguments else None

    def _class_of(self, definition: ast.ClassDef) -> _Class | None:
        """Returns a class of settings with all fields, inherited ones first; None: the source does not tell."""
        decorators = {_last_name(d.func if isinstance(d, ast.Call) else d) for d in definition.decorator_list}
        if not decorators <= _DECORATORS:
            return None
        fields: dict[str, tuple[ast.expr, ast.expr | None, _Module]] = {}
        for base in reversed(definition.bases):
            base = base.value if isinstance(base, ast.Subscript) else base
            module, parent = self.resolve(base)
            inherited = module._class_of(parent) if isinstance(parent, ast.ClassDef) else None
            if inherited is None and _last_name(base) not in _BASES_WITHOUT_FIELDS:
                return None
            fields |= inherited.fields if inherited else {}
        if "dataclass" in decorators:
            for statement in definition.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    fields[statement.target.id] = (statement.annotation, statement.value, self)
        elif not fields:
            return None
        return _Class(fields)

    def _is_spelled(self, kind: ast.AST | None) -> bool:
        """Returns whether a command line can spell the values of a type."""
        if isinstance(kind, ast.Constant):
            return kind.value in (None, ...)
        if isinstance(kind, ast.BinOp):
            return self._is_spelled(kind.left) and self._is_spelled(kind.right)
        if isinstance(kind, ast.Tuple):
            return all(map(self._is_spelled, kind.elts))
        if isinstance(kind, ast.Subscript):
            name = _last_name(kind.value)
            return name == "Literal" or (name == "tuple" and self._is_spelled(kind.slice))
        if isinstance(kind, ast.Name) and kind.id in _SPELLED:
            return True
        module, meaning = self.resolve(kind)
        return isinstance(meaning, ast.expr) and module._is_spelled(meaning)


@cache
def _meanings(path: Path) -> Mapping[str, ast.AST | None]:
    """Returns the meaning of each name at the top of a file: the value it is set to, a class, a function, or the import
    that brings it; None for one that is set more than once, or not by itself.
    """
    meanings: dict[str, ast.AST | None] = {}
    values: dict[ast.AST, ast.expr | None] = {}  # of the targets of assignments
    for node in _top_level_nodes(ast.parse(path.read_bytes())):
        names: dict[str, ast.AST | None] = {}
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = {node.name: node}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            values |= dict.fromkeys(node.targets if isinstance(node, ast.Assign) else [node.target], node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = {node.id: values.get(node)}
        meanings |= {name: None if name in meanings else meaning for name, meaning in names.items()}
    return meanings


def _top_level_nodes(block: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a file that are outside functions and classes, each after the node that contains it."""
    for node in ast.iter_child_nodes(block):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _top_level_nodes(node)


def _module_named(statement: ast.Import, name: str) -> str:
    alias = next(alias for alias in statement.names if (alias.asname or alias.name.partition(".")[0]) == name)
    return alias.name if alias.asname else name


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _dashed(name: str) -> str:
    return name.replace("_", "-")
