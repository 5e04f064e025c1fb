"""A recipe from the command line: its fields by dotted name, with their declared types (tyro).

Invariant: what a field *is* (which task, which objective) is decided by the recipe's code; the command line sets the
values inside. Anything it cannot take ends in one sentence and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import io
import pkgutil
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeVar

import tyro

from tba.errors import UserError
from tba.field_comments import comments
from tba.recipe import Recipe

T = TypeVar("T")
Kind: TypeAlias = Literal["recipe", "study"]
MARK = "::"  # between a study's name or path and a variant's name
_SHIPPED: dict[Kind, str] = {"recipe": "tba.recipes", "study": "tba.research.studies"}  # loaded when they are named
_PLAIN = (str, int, float, bool, Path, type(None))
_TITLES = "(Invalid choice|Missing argument|Unrecognized options|Value error)"  # of tyro's boxes
_GONE = {"--replay.recent-window": "what is recent is told by arrival now, not by the age of the weights"}
_being_loaded: list[Path] = []
_NO_NUMBER = re.compile(r"(?:invalid literal for int\(\) with base 10|could not convert string to float): (.*)")
_BOX = "│╭╰─╮╯-| "  # what tyro draws around its messages


def find(name: str) -> Recipe:
    """The recipe of a name (`quickstart`), of a path to a Python file that defines `recipe`, or of STUDY::VARIANT."""
    study, mark, variant = name.partition(MARK)
    if mark:
        recipe: Recipe = defined(study, "study").recipe_of(variant)
        return recipe
    return _recipe_in(module_of(name, "recipe"), name)


def defined(name: str, kind: Kind) -> Any:
    """What the module of a name (`staleness`) or a path defines as `recipe` or `study`; None when it does not."""
    return getattr(module_of(name, kind), kind, None)


def names(kind: Kind = "recipe") -> list[str]:
    """Those that come with the package."""
    path = importlib.import_module(_SHIPPED[kind]).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


def module_of(name: str, kind: Kind) -> ModuleType:
    """The module that defines a recipe or a study: one of those shipped, by name, or a file's."""
    if name.endswith(".py"):
        return _from_file(Path(name), kind)
    shipped = names(kind)
    if name not in shipped:
        near = difflib.get_close_matches(name, shipped, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"`tba {_SHIPPED[kind].rpartition('.')[2]}` lists them."
        there = ", ".join(shipped)
        raise UserError(f"there is no {kind} {name!r}; give one of {there} or a path to a .py file; {hint}")
    return importlib.import_module(f"{_SHIPPED[kind]}.{name}")


def _from_file(path: Path, kind: Kind) -> ModuleType:
    if not path.is_file():
        raise UserError(f"there is no {kind} file {path}: give the path of a Python file that defines `{kind}`")
    spec = importlib.util.spec_from_file_location(f"tba_user_{kind}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be read as a Python module: give a .py file that defines `{kind}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look their module up
    _being_loaded.append(path)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{_place(error, path)}: {type(error).__name__}: {error}; mend the {kind} there") from error
    finally:
        _being_loaded.pop()
    return module


def being_loaded() -> Path | None:
    """The file of a recipe or a study that is being loaded now; None where none is."""
    return _being_loaded[-1] if _being_loaded else None


def _place(error: BaseException, path: Path) -> str:
    """Where in a user's file it went wrong."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno or 1}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _recipe_in(module: Any, where: str) -> Recipe:
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise UserError(f"{where} defines no `recipe = Recipe(...)`: add one, see `examples/my_task.py`")
    return recipe


def override(default: T, arguments: Sequence[str], program: str) -> T:
    """`default` with fields set from `--dotted.name value` arguments. Raises `UserError` for what does not fit."""
    if not arguments:
        return default
    known = set(flags(default))
    for argument in arguments:
        if argument.startswith("--") and argument not in ("--help",):
            flag = argument.split("=")[0].replace("_", "-")
            if flag in _GONE:
                raise UserError(f"{program}: {flag} is gone, for {_GONE[flag]}: leave it out")
            if flag not in known and flag.replace(".no-", ".").replace("--no-", "--") not in known:
                raise UserError(f"{program} has no field {argument.split('=')[0]}; {_nearest(flag, known, program)}")
    _refuse_values_of_switches(default, arguments, program)
    if "--help" in arguments or "-h" in arguments:
        explained = _concrete(default, comments)
        tyro.cli(explained, default=_as(explained, default), args=["--help"], prog=program)
    if isinstance(default, Recipe):
        default = typing.cast(T, _lasting(default, arguments))
    kind = _concrete(default, lambda _: {})
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parsed = tyro.cli(kind, default=_as(kind, default), args=list(arguments), prog=program)
    except SystemExit as error:
        raise UserError(_one_sentence(said.getvalue(), arguments, program)) from error
    return typing.cast(T, _back(default, parsed))


def _lasting(recipe: Recipe, arguments: Sequence[str]) -> Recipe:
    """The recipe with a learning rate that lasts as long as the `--steps` that are asked for, if nothing is said of it.

    A run of fewer steps is the beginning of the whole one.
    """
    told = [a.removeprefix("--steps=") for a in arguments if a.startswith("--steps=")]
    told += [value for flag, value in pairwise(arguments) if flag == "--steps"]
    shape = recipe.optimizer.schedule
    if shape.planned is None or any(a.startswith("--optimizer.schedule") for a in arguments):
        return recipe
    steps = max((int(value) for value in told if value.isdecimal()), default=0)
    if steps <= shape.planned:
        return recipe
    return dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, schedule=shape.lasting(steps)))


def _nearest(flag: str, known: Iterable[str], program: str) -> str:
    """What may have been meant: a field of that name elsewhere, or one that is spelt nearly so in the same place."""
    place, _, name = flag.rpartition(".") if "." in flag else ("-", "", flag.lstrip("-"))
    last = {k: k.lstrip("-").rpartition(".")[2] for k in known}
    beside = {last[k]: k for k in known if (k.rpartition(".")[0] or "-") == place}
    near = [beside[n] for n in difflib.get_close_matches(name, beside, n=1, cutoff=0.6)]
    near = near or sorted((k for k in known if last[k] == name), key=len)[:1]
    near = near or difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
    if near:
        return f"did you mean {near[0]}?"
    there = sorted(beside.values()) if place != "-" else []
    return f"there is {', '.join(there)}." if there else f"`{program} --help` lists all fields."


def _refuse_values_of_switches(default: Any, arguments: Sequence[str], program: str) -> None:
    """`--switch false`, which other programs take."""
    for flag, given in pairwise(arguments):
        if given.lower() in ("true", "false") and flag.replace("_", "-") in _switches(default):
            place, _, name = flag.replace("_", "-").rpartition(".")
            off = f"{place}.no-{name}" if place else f"--no-{name.removeprefix('--')}"
            raise UserError(
                f"{program} takes {flag} without a value: give {flag} to switch it on, {off} to switch it off"
            )


def _switches(default: Any, prefix: str = "--") -> set[str]:
    """The flags of all that is on or off."""
    found: set[str] = set()
    for name, value, hint in _fields(default):
        flag = prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            found |= _switches(value, f"{flag}.")
        elif hint is bool:
            found.add(flag)
    return found


def split_options(options: T, arguments: Sequence[str], program: str) -> tuple[T, list[str]]:
    """The command's own options taken out of `arguments`; what is left sets the recipe's fields."""
    own, rest, mine = set(flags(options)), [], []
    switches = {f"--{name.replace('_', '-')}" for name, value, _ in _fields(options) if isinstance(value, bool)}
    waiting = iter(arguments)
    for argument in waiting:
        if argument.split("=")[0].replace("_", "-") not in own:
            rest.append(argument)
            continue
        mine.append(argument)
        if "=" not in argument and argument.replace("_", "-") not in switches:
            value = next(waiting, None)
            if value is None:
                raise UserError(f"{program} {argument} needs a value")
            mine.append(value)
    return override(options, mine, program), rest


def flags(default: Any, prefix: str = "--") -> list[str]:
    """Every dotted flag of a settings value."""
    found = []
    for name, value, _ in _fields(default):
        flag = prefix + name.replace("_", "-")
        found += flags(value, flag + ".") if dataclasses.is_dataclass(value) else [flag]
    return found


def _fields(default: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, type) of what the command line can set: settings within, and plain values.

    The rest (functions, tuples of settings, parts that are chosen by code and are None here) is the recipe's own.
    """
    hints = typing.get_type_hints(type(default))
    for f in dataclasses.fields(default):
        value, hint = getattr(default, f.name), hints[f.name]
        if f.init and (dataclasses.is_dataclass(value) or _is_plain(hint)):
            yield f.name, value, hint


def _is_plain(hint: Any) -> bool:
    """Whether a command line can spell values of this type."""
    if typing.get_origin(hint) is typing.Literal or hint is Ellipsis:
        return True
    inner = typing.get_args(hint)
    return all(_is_plain(option) for option in inner) if inner else hint in _PLAIN


def _concrete(default: Any, explain: Callable[[type], Mapping[str, str]]) -> Any:
    """A dataclass type of the same fields, in which each nested settings value has its actual class.

    tyro asks the declared type; ours are protocols and unions, whose choice the recipe has already made. `explain`
    gives each field's help.
    """
    said, made = explain(type(default)), []
    for name, value, hint in _fields(default):
        kind = _concrete(value, explain) if dataclasses.is_dataclass(value) else hint
        kind = typing.Annotated[kind, tyro.conf.arg(help=said.get(name, ""))]  # else tyro looks through sources, slowly
        made.append((name, kind, dataclasses.field()))
    kind = dataclasses.make_dataclass(type(default).__name__, made, frozen=True)
    kind.__doc__ = type(default).__doc__
    return kind


def _as(kind: Any, default: Any) -> Any:
    values = {}
    for name, inner in typing.get_type_hints(kind).items():
        value = getattr(default, name)
        values[name] = _as(inner, value) if dataclasses.is_dataclass(value) else value
    return kind(**values)


def _back(default: Any, parsed: Any) -> Any:
    values = {}
    for f in dataclasses.fields(parsed):
        old, new = getattr(default, f.name), getattr(parsed, f.name)
        values[f.name] = _back(old, new) if dataclasses.is_dataclass(old) else new
    return dataclasses.replace(default, **values)


def _one_sentence(said: str, arguments: Sequence[str], program: str) -> str:
    """What tyro drew as a box, as a sentence."""
    words = " ".join(" ".join(line.strip(_BOX) for line in said.splitlines()).split())
    culprit = re.search(r"Error parsing (\S+): (.*?)(?: [-─]{3}| Argument helptext| For full helptext|$)", words)
    wanted = re.search(r"Argument helptext: \S+ (\S+)", words)
    if culprit is None:
        given = " ".join(arguments)
        words = re.sub(f"^{_TITLES} ", "", words).split(" For full helptext")[0]
        return f"{program} cannot take `{given}`: {words[:200]} (`{program} --help` lists all fields)"
    kind = f", it wants {wanted[1]}" if wanted else ""
    number = _NO_NUMBER.search(culprit[2])
    if number is not None:
        what = "a whole number" if "literal" in culprit[2] else "a number"
        return f"{program} {culprit[1]} takes {what}, not {number[1].rstrip('.')}"
    return (
        f"{program} cannot take this {culprit[1]}: {culprit[2].rstrip('.')}{kind}; `{program} --help` lists all fields"
    )
