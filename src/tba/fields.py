"""The fields of settings by dotted name: which exist, which have an effect, parsing of their values, their help.

Invariant: what a field takes follows from its declared type alone; an unknown field, or a value that does not fit its
type, ends in one sentence. Nothing is guessed from a value. What a field takes in code follows from its type as well
(`as_declared`).

A settings class may say that some of its fields have no effect, given the values of others: its property `unused` maps
the name of each (or of nested settings, which stands for all of theirs) to what would give it an effect, beginning with
the name of a field: `{"low": "signal"}`, `{"cluster": "runtime cluster"}`. Such a field is shown, and can be set, once
it has an effect.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import numbers
import re
import textwrap
import tokenize
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union

from tba.errors import UserError

BY_CODE = {"by_code": True}  # the metadata of a field that a recipe's code sets, and no command line
T = TypeVar("T")
_LARGEST = 2**63  # of a whole number: torch and SQLite take no larger ones
_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "True or False", Path: "a path"}
_PLAIN = (str, Path, numbers.Real, type(None), list, tuple, set, Mapping)  # what is no component of anybody's
_COMMENT = re.compile(r"#\s*(noqa: [A-Z0-9, ]+ - )?")  # what begins a comment, possibly after a remark to the linter
_INDENT, _WIDTH = 26, 80  # columns of a help text: before what a field means, and in all


@dataclass(frozen=True)
class Field:
    """One field that can be set."""

    flag: str  # the option that sets it
    settings: Any  # the settings object that has the field
    name: str
    hint: Any

    @property
    def value(self) -> Any:
        return getattr(self.settings, self.name)

    @property
    def place(self) -> str:
        """The flag without its last name: the settings that have the field."""
        return self.flag.rpartition(".")[0] or "-"

    @property
    def is_switch(self) -> bool:
        """Returns whether it is on or off, or decided by the program where neither is said (None)."""
        return self.hint in (bool, bool | None)

    @property
    def off(self) -> str:
        """The flag that switches it off, for a field that is a switch."""
        place, dot, name = self.flag.removeprefix("--").rpartition(".")
        return f"--{place}{dot}no-{name}"


def fields_of(settings: Any, prefix: str = "--", by_code: bool = False) -> Iterator[Field]:
    """Yields every field that can be set, those of nested settings under their dotted names.

    The rest (functions, tuples of settings, components that are chosen by code and are None here) only a recipe can
    set. by_code: include those that a command line could spell but that are for code to set.
    """
    hints = typing.get_type_hints(type(settings))
    for f in dataclasses.fields(settings):
        flag, value = prefix + f.name.replace("_", "-"), getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{flag}.", by_code)
        elif f.init and is_plain(hints[f.name]) and (by_code or "by_code" not in f.metadata):
            yield Field(flag, settings, f.name, hints[f.name])


def without_effect(settings: Any, prefix: str = "--") -> dict[str, str]:
    """Returns the flags of fields without effect, and of nested settings of which none has any: what would give them
    one.
    """
    found = {}
    for name, when in getattr(settings, "unused", {}).items():
        switch, _, value = when.partition(" ")
        found[_dashed(prefix + name)] = f"{_dashed(prefix + switch)} {value}".rstrip()
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            found |= without_effect(value, f"{prefix}{_dashed(f.name)}.")
    return found


def counting(settings: Any) -> list[Field]:
    """Returns the fields that can be set and have an effect."""
    idle = without_effect(settings)
    return [field for field in fields_of(settings) if _cause(field.flag, idle) is None]


def flags(settings: Any) -> list[str]:
    """Returns the flags of all fields that can be set and have an effect."""
    return [field.flag for field in counting(settings)]


def _cause(flag: str, idle: Mapping[str, str]) -> str | None:
    """Returns what would give the field an effect; None: it has one."""
    return next((when for name, when in idle.items() if flag == name or flag.startswith(f"{name}.")), None)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def is_plain(hint: Any) -> bool:
    """Returns whether a command line can spell values of this type."""
    if typing.get_origin(hint) is Literal or hint is Ellipsis:
        return True
    inner = typing.get_args(hint)
    if inner:
        return typing.get_origin(hint) in (tuple, Union, UnionType) and all(is_plain(option) for option in inner)
    return hint is type(None) or hint in _KINDS


def given(arguments: Sequence[str], settings: Any, program: str, by_code: bool = False) -> list[tuple[Field, Any]]:
    """Returns the fields that `arguments` name, each with its value, in their order.

    by_code: include those that are for code to set. Raises `UserError` for an unknown field, or a value that does not
    fit.
    """
    known = {field.flag: field for field in fields_of(settings, by_code=True)}
    allowed = {field.flag for field in fields_of(settings, by_code=by_code)}
    off = {field.off: field for field in known.values() if field.is_switch}
    refuse_unknown([flag for flag in flags_in(arguments) if _dashed(flag) not in known.keys() | off], known, program)
    found: list[tuple[Field, Any]] = []
    left = list(arguments)
    while left:
        name, joined, word = left.pop(0).partition("=")
        flag = _dashed(name)
        if not name.startswith("--"):
            raise UserError(f"{program} does not take {name!r}: fields are set as --name value")
        field = known[flag] if flag in known else off[flag]
        if field.flag not in allowed:
            raise UserError(f"{program} does not take {name}: only a recipe's code can set it")
        if field.is_switch:
            said = word if joined else "".join(left[:1])
            if field.hint is not bool and flag in known and said == "None":
                left = left[0 if joined else 1 :]
                found.append((field, None))
                continue
            if joined or (left and left[0].lower() in ("true", "false")):
                raise UserError(
                    f"{program} takes {name} without a value: give {field.flag} to switch it on, {field.off} to switch "
                    "it off"
                )
            found.append((field, flag in known))
            continue
        words = [word] if joined else _words(left, field.hint)
        found.append((field, _value(words, field, program)))
        del left[: 0 if joined else len(words)]
    return found


def _words(left: Sequence[str], hint: Any) -> list[str]:
    """Returns those of the words after a field's name that are its value."""
    end = next((i for i, word in enumerate(left) if word.startswith("--")), len(left))
    if typing.get_origin(hint) is not tuple:
        return list(left[: min(end, 1)])
    parts = typing.get_args(hint)
    return list(left[: end if Ellipsis in parts else min(end, len(parts))])


def _value(words: Sequence[str], field: Field, program: str) -> Any:
    try:
        return _read(words, field.hint)
    except ValueError:
        if not words:
            raise UserError(f"{program} {field.flag} needs a value: it takes {_kind(field.hint)}") from None
        raise UserError(
            f"{program} {field.flag} takes {_kind(field.hint)}, not {' '.join(words)!r:.80}; `{program} --help` lists "
            "all fields"
        ) from None


def _read(words: Sequence[str], hint: Any) -> Any:
    """Parses a value of type `hint`. Raises `ValueError` if the words are none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        kinds = [inner[0]] * len(words) if Ellipsis in inner else inner
        return tuple(_read([word], kind) for word, kind in zip(words, kinds, strict=True))
    if len(words) != 1:
        raise ValueError
    if origin in (Union, UnionType):
        return _first(words[0], inner)
    few = {type(None): (None,), bool: (True, False)}.get(hint, inner)  # all values of the type, where there are few
    if not few:
        return _finite(hint(words[0]))
    named = {str(value): value for value in few}
    if words[0] not in named:
        raise ValueError
    return named[words[0]]


def _finite(value: Any) -> Any:
    """Returns the value. Raises `ValueError` for a number that nothing can be set to."""
    if (isinstance(value, int) and abs(value) >= _LARGEST) or value != value:
        raise ValueError
    return value


def _first(word: str, kinds: Iterable[Any]) -> Any:
    """Returns the value of the first of several types that accepts the word; text, which accepts any, comes last."""
    for kind in sorted(kinds, key=lambda kind: (kind is not type(None), kind in (str, Path))):
        try:
            return _read([word], kind)
        except ValueError:
            continue
    raise ValueError


def _kind(hint: Any) -> str:
    """Returns what a field of this type takes, in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return f"any number of: {_kind(inner[0])}" if Ellipsis in inner else " and ".join(map(_kind, inner))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, UnionType):
        return " or ".join(_kind(kind) for kind in inner)
    if hint is type(None):
        return "None"
    if dataclasses.is_dataclass(hint) and len(hints := _hints(typing.cast(type, hint))) == 1:
        return _kind(*hints.values())
    return _KINDS.get(hint) or f"{getattr(hint, '__name__', hint)}(...)"


def as_declared(kind: type[T]) -> type[T]:
    """Lets a class of settings take, for a field, what can mean only one value of the type that the field declares: a
    text for a path or a number, a number for a schedule, a list for a tuple, and what stands alone for a tuple of one.
    It stands below `@dataclass`.

    Anything else that the type excludes raises a `UserError` naming class and field. Of protocols and functions nothing
    is known here.
    """
    declared: Any = kind  # no type says of a class that it has fields
    after = getattr(kind, "__post_init__", None)

    def made(self: Any) -> None:
        for name, hint in _hints(declared).items():
            value = getattr(self, name, None)
            try:
                meant = _meant(value, hint)
            except ValueError:
                raise UserError(f"{type(self).__name__}'s {name} is {value!r:.80}: give {_kind(hint)}") from None
            if meant is not value:
                object.__setattr__(self, name, meant)
        if after is not None:
            after(self)

    declared.__post_init__ = made
    return kind


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Returns the types of the fields that are given to a class when it is made."""
    hints = typing.get_type_hints(kind)
    made = [f.name for f in dataclasses.fields(typing.cast(Any, kind)) if f.init]
    return {name: hints[name] for name in made}


def _meant(value: Any, hint: Any) -> Any:
    """Returns the value of type `hint` that `value` can only mean. Raises `ValueError` if there is none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return _meant_first(value, inner)
    if origin is tuple:
        if Ellipsis in inner and isinstance(value, str | Path | numbers.Real):
            value = (value,)
        if not isinstance(value, list | tuple):
            raise ValueError
        kinds = [inner[0]] * len(value) if Ellipsis in inner else inner
        made = tuple(_meant(one, kind) for one, kind in zip(value, kinds, strict=True))
        return value if isinstance(value, tuple) and made == value else made
    if origin is Literal:
        if value not in inner and not isinstance(value, str):
            raise ValueError
        return value if value in inner else _read([value], hint)
    if hint in (int, float) and isinstance(value, str):
        return _read([value.strip()], hint)
    if hint in (int, float) and type(value) is not bool and isinstance(value, numbers.Real):
        return _number(value, hint)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is str and isinstance(value, Path):
        return str(value)
    if hint is type(None) or hint in _KINDS:
        if not isinstance(value, hint) or (hint in (int, float) and isinstance(value, bool)):
            raise ValueError
    elif dataclasses.is_dataclass(hint) and isinstance(value, _PLAIN):
        return _wrapped_in(value, typing.cast(type, hint))
    return value


def _meant_first(value: Any, kinds: Sequence[Any]) -> Any:
    """Returns what a value means by the first of several types that excludes nothing of it; by text last."""
    same = [kind for kind in kinds if type(value) is kind]
    for kind in [*same, *sorted(kinds, key=lambda kind: kind in (str, Path))]:
        try:
            return _meant(value, kind)
        except ValueError:
            continue
    raise ValueError


def _number(value: Any, kind: type) -> Any:
    """Returns a number as a Python number of the kind. Raises `ValueError` for a part of a whole one."""
    if isinstance(value, kind) or (kind is float and isinstance(value, int)):
        return value
    if kind(value) != value:
        raise ValueError
    return kind(value)


def _wrapped_in(value: Any, kind: type) -> Any:
    """Returns the settings of those fields, or whose only field has that value. Raises `ValueError` for neither."""
    hints = _hints(kind)
    if isinstance(value, Mapping) and value.keys() <= hints.keys():
        return kind(**value)
    if len(hints) != 1:
        raise ValueError
    return kind(*(_meant(value, hint) for hint in hints.values()))


_THEIR_NAMES = {  # what TRL, verl and prime-rl call it; two fields where one of theirs sets both
    "learning-rate": ("--optimizer.lr",), "num-generations": ("--samples-per-prompt", "--group-size"),
    "batch-size": ("--groups-per-step",), "per-device-train-batch-size": ("--max-tokens-per-pass",),
    "max-prompt-length": ("--prompts.max-tokens",), "use-vllm": ("--model.generation.engine",),
    "max-completion-length": ("--model.generation.max-completion-tokens",), "beta": ("--objective.beta.value",),
    "temperature": ("--exploration.temperature", "--policy-temperature"), "lora-rank": ("--model.lora.rank",),
    "save-steps": ("--run.checkpoint-every",), "eval-steps": ("--evaluation.every",), "report-to": ("--record.wandb",),
    "output-dir": ("`--runs DIR`",), "resume": ("`tba resume RUN`",), "resume-from-checkpoint": ("`tba resume RUN`",),
}  # fmt: skip


def flags_in(arguments: Iterable[str]) -> list[str]:
    """Returns the flags among the words of a command line, without their values."""
    return [word.partition("=")[0] for word in arguments if word.startswith("--")]


def refuse_unknown(unknown: Sequence[str], candidates: Collection[str], program: str) -> None:
    """Raises `UserError` when there are flags that no field has: it names all of them, and what each may mean among
    the candidates.
    """
    if unknown:
        answers = [f"{flag}; {_nearest(flag, candidates, program)}" for flag in dict.fromkeys(unknown)]
        raise UserError(f"{program} has no field {' And no field '.join(answers)}")


def _nearest(unknown: str, candidates: Iterable[str], program: str) -> str:
    """Returns what may have been meant: what other libraries call so, a field of that name elsewhere, or a similar name
    in the same place.
    """
    flag = _dashed(unknown)
    place, _, name = flag.rpartition(".") if "." in flag else ("-", "", flag.lstrip("-"))
    last = {flag: flag.lstrip("-").rpartition(".")[2] for flag in candidates}
    translations = [word for word in _THEIR_NAMES.get(flag.lstrip("-"), ()) if word in last or word.startswith("`")]
    if translations:
        return f"did you mean {'both ' if translations[1:] else ''}{' and '.join(translations)}?"
    same = {last[flag]: flag for flag in last if (flag.rpartition(".")[0] or "-") == place}
    near = [same[n] for n in difflib.get_close_matches(name, same, n=1, cutoff=0.6)]
    near = near or sorted((k for k in last if last[k] == name), key=len)[:1]
    near = near or difflib.get_close_matches(flag, last, n=1, cutoff=0.8)
    inside = [other for other in last if other.startswith(f"{flag}.")]
    if inside:
        part = flag.lstrip("-").replace("-", "_")
        names, code = part.split("."), "..."
        for i in reversed(range(len(names))):
            code = f"dataclasses.replace({'.'.join(['recipe', *names[:i]])}, {names[i]}={code})"
        return (
            f"{part} is a part of the recipe with fields of its own, such as {inside[0]}. Another {part} is chosen in "
            f"code, in a file of your own: import the recipe, and `recipe = {code}`"
        )
    if near:
        return f"did you mean {near[0]}?"
    there = sorted(same.values()) if place != "-" else []
    return f"there is {', '.join(there)}." if there else f"`{program} --help` lists all fields."


def replaced(settings: Any, values: Mapping[str, Any], prefix: str = "--") -> Any:
    """Returns the settings with these values, by flag."""
    changes = {}
    for f in dataclasses.fields(settings):
        flag, value = prefix + _dashed(f.name), getattr(settings, f.name)
        if flag in values:
            changes[f.name] = values[flag]
        elif dataclasses.is_dataclass(value) and any(name.startswith(f"{flag}.") for name in values):
            changes[f.name] = replaced(value, values, f"{flag}.")
    return dataclasses.replace(settings, **changes) if changes else settings


def refuse_without_effect(settings: Any, named: Iterable[str], program: str) -> None:
    """Raises `UserError` when one of the fields that were `named` has no effect."""
    idle = without_effect(settings)
    for flag in named:
        if (when := _cause(flag, idle)) is not None:
            raise UserError(f"{program}: {flag} has no effect without {when}: give that too, or leave {flag} out")


def split_options(options: T, arguments: Sequence[str], program: str) -> tuple[T, list[str]]:
    """Takes the command's own options out of `arguments`; what is left sets the recipe's fields."""
    by_flag = {field.flag: field for field in fields_of(options)}
    words, remaining = [], []
    waiting = iter(arguments)
    for argument in waiting:
        field = by_flag.get(_dashed(argument.partition("=")[0]))
        if field is None:
            remaining.append(argument)
            continue
        words.append(argument)
        if "=" not in argument and not field.is_switch:
            value = next(waiting, None)
            if value is None:
                raise UserError(f"{program} {argument} needs a value")
            words.append(value)
    values = given(words, options, program)
    chosen: T = replaced(options, {field.flag: value for field, value in values})
    refuse_without_effect(chosen, (field.flag for field, _ in values), program)
    return chosen, remaining


def help_of(settings: Any, first: Sequence[str] = ()) -> str:
    """Returns every field with an effect, its value and its meaning: those in `first` before the rest, which has
    headings.

    At the end it says what would give the other fields an effect.
    """
    fields = counting(settings)
    known = {f.flag: f for f in fields}
    blocks = [["what is set most:", *rows([known[flag] for flag in first if flag in known])]] if first else []
    places: dict[str, list[Field]] = {}
    for f in fields:
        if f.flag not in first:
            places.setdefault(f.place, []).append(f)
    roots = list(dict.fromkeys(["-", *(_root(place) for place in places)]))
    for place in sorted(places, key=lambda place: (roots.index(_root(place)), place)):
        blocks.append([_heading(place, places[place][0].settings), *rows(places[place])])
    waiting: dict[str, list[str]] = {}
    for flag, when in without_effect(settings).items():
        waiting.setdefault(when, []).append(flag)
    if waiting:
        lines = [line for when, names in waiting.items() for line in row(f"  {when}", ", ".join(names))]
        blocks.append(["there is more with:", *lines])
    return "\n\n".join("\n".join(block) for block in blocks)


def comments(kind: type) -> dict[str, str]:
    """Returns field -> the comment after it, with the comment lines that follow; empty without the source.

    So a setting is explained where it is defined and nowhere else: an inherited one by the class it comes from.
    """
    bases = (base for base in reversed(kind.__mro__) if "__dataclass_fields__" in vars(base))
    return {name: said for base in bases for name, said in _own_comments(base).items()}


def _own_comments(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:  # made in a console
        return {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    fields = [
        (s.lineno, s.target.id) for s in body.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
    ]
    if not fields:
        return {}  # it only inherits
    ends = [line - 1 for line, _ in fields[1:]] + [max(line for line, _ in fields)]
    by_line = {
        t.start[0]: _COMMENT.sub("", t.string, count=1).strip()
        for t in tokenize.generate_tokens(StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    own_line = [n for n, line in enumerate(source.splitlines(), 1) if line.strip().startswith("#")]
    said = {}
    for (line, name), end in zip(fields, ends, strict=True):
        while end + 1 in own_line:
            end += 1
        said[name] = " ".join(by_line[n] for n in range(line, end + 1) if n in by_line)
    return said


def _root(place: str) -> str:
    return place.partition(".")[0]


def _heading(place: str, settings: Any) -> str:
    """Returns whose fields follow: their place, their class and the first sentence of its docstring."""
    said = " ".join(inspect.cleandoc(type(settings).__doc__ or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z])", said)[0]
    return textwrap.fill(f"{place.removeprefix('--').strip('-') or 'the run'}: {sentence}", _WIDTH)


def rows(fields: Sequence[Field]) -> list[str]:
    """Returns the lines of a help text about these fields."""
    meanings = {kind: comments(kind) for kind in {type(f.settings) for f in fields}}
    lines = []
    for f in fields:
        said = meanings[type(f.settings)].get(f.name, "")
        choices = f"; {_kind(f.hint)}" if typing.get_origin(f.hint) is Literal else ""
        lines += row(f"  {f.flag}", f"{said}{choices}{_default(f.value)}")
    return lines


def _default(value: Any) -> str:
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})".replace("\n", "\\n")


def row(flag: str, meaning: str) -> list[str]:
    """Returns a flag with its meaning to the right; below it where the flag is long."""
    lines = textwrap.wrap(meaning, _WIDTH - _INDENT, break_long_words=True, break_on_hyphens=False)
    lines = [f"{' ' * _INDENT}{line}" for line in lines]
    if not lines:
        return [flag]
    if len(flag) + 2 > _INDENT:
        return [flag, *lines]
    return [flag.ljust(_INDENT) + lines[0].lstrip(), *lines[1:]]
