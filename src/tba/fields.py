"""The fields of settings by dotted name: which exist, which have an effect, parsing of their values, their help.

Invariant: what a field takes, on a command line and in code (`as_declared`), follows from its declared type alone; an
unknown field, or a value that does not fit its type, ends in one sentence. Nothing is guessed from a value.

A settings class may say that some of its fields have no effect, given the values of others: its property `unused` maps
the name of each (or of nested settings, for all names in them) to what would give it an effect, beginning with
the name of a field: `{"lower_bound": "signal"}`, `{"cluster": "runtime cluster"}`. Such a field is shown, and can be
set, once it has an effect.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import textwrap
import tokenize
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, runtime_checkable

from tba.errors import UserError
from tba.typed_values import SCALARS, convert, describe, field_types

BY_CODE = {"by_code": True}  # the metadata of a field that a recipe's code sets, and no command line
T = TypeVar("T")
_COMMENT = re.compile(r"#\s*(noqa: [A-Z0-9, ]+ - )?")  # what begins a comment, possibly after a remark to the linter
_INDENT, _WIDTH = 26, 80  # columns of a help text: before what a field means, and in all


@runtime_checkable
class HasUnusedFields(Protocol):
    """Settings some of whose fields may have no effect."""

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the name of each field without effect, and what would give it one."""


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
        """Returns the flag of the settings that have the field: without its last name."""
        return self.flag.rpartition(".")[0] or "-"

    @property
    def is_switch(self) -> bool:
        """Returns whether its value is on or off, or None: the program decides."""
        return self.hint in (bool, bool | None)

    @property
    def off(self) -> str:
        """Returns the flag that switches a field off that is a switch."""
        place, dot, name = self.flag.removeprefix("--").rpartition(".")
        return f"--{place}{dot}no-{name}"


def fields_of(settings: Any, prefix: str = "--", by_code: bool = False) -> Iterator[Field]:
    """Yields every field that a command line can set, those of nested settings under their dotted names.

    Functions, tuples of settings, and components that are None can be set by a recipe's code only. by_code: include
    fields that a command line could spell but that are for code to set.
    """
    types = field_types(settings.__class__)
    for f in dataclasses.fields(settings):
        flag, value = prefix + f.name.replace("_", "-"), getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{flag}.", by_code)
        elif f.name in types and is_plain(types[f.name]) and (by_code or "by_code" not in f.metadata):
            yield Field(flag, settings, f.name, types[f.name])


def without_effect(settings: Any, prefix: str = "--") -> dict[str, str]:
    """Returns the flags of fields without effect, and of nested settings of which no field has any, each with the flag
    and the value that would give it one.
    """
    remedies = {}
    for name, remedy in settings.unused.items() if isinstance(settings, HasUnusedFields) else ():
        switch, _, value = remedy.partition(" ")
        remedies[_dashed(prefix + name)] = f"{_dashed(prefix + switch)} {value}".rstrip()
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            remedies |= without_effect(value, f"{prefix}{_dashed(f.name)}.")
    return remedies


def fields_with_effect(settings: Any) -> list[Field]:
    """Returns the fields that can be set and have an effect."""
    remedies = without_effect(settings)
    return [field for field in fields_of(settings) if _remedy(field.flag, remedies) is None]


def flags(settings: Any) -> list[str]:
    """Returns the flags of all fields that can be set and have an effect."""
    return [field.flag for field in fields_with_effect(settings)]


def _remedy(flag: str, remedies: Mapping[str, str]) -> str | None:
    """Returns what would give the field an effect; None: it has one."""
    return next((remedy for name, remedy in remedies.items() if flag == name or flag.startswith(f"{name}.")), None)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def is_plain(hint: Any) -> bool:
    """Returns whether a command line can spell values of this type."""
    if typing.get_origin(hint) is Literal or hint is Ellipsis:
        return True
    if parts := typing.get_args(hint):
        return typing.get_origin(hint) in (tuple, Union, UnionType) and all(map(is_plain, parts))
    return hint in SCALARS


def parse_fields(
    arguments: Sequence[str], settings: Any, program: str, by_code: bool = False
) -> list[tuple[Field, Any]]:
    """Returns the fields that `arguments` name, each with its value, in their order.

    by_code: include those that are for code to set. Raises `UserError` for an unknown field, or a value that does not
    fit.
    """
    by_flag = {field.flag: field for field in fields_of(settings, by_code=True)}
    allowed_flags = {field.flag for field in fields_of(settings, by_code=by_code)}
    by_off_flag = {field.off: field for field in by_flag.values() if field.is_switch}
    unknown_flags = [flag for flag in flags_in(arguments) if _dashed(flag) not in by_flag.keys() | by_off_flag]
    refuse_unknown(unknown_flags, by_flag, program)
    values: list[tuple[Field, Any]] = []
    remaining = list(arguments)
    while remaining:
        name, equals_sign, word = remaining.pop(0).partition("=")
        flag = _dashed(name)
        if not name.startswith("--"):
            raise UserError(f"{program} does not take {name!r}: fields are set as --name value")
        field = by_flag[flag] if flag in by_flag else by_off_flag[flag]
        if field.flag not in allowed_flags:
            raise UserError(f"{program} does not take {name}: only a recipe's code can set it")
        if field.is_switch:
            next_word = word if equals_sign else "".join(remaining[:1])
            if field.hint is not bool and flag in by_flag and next_word == "None":
                remaining = remaining[0 if equals_sign else 1 :]
                values.append((field, None))
                continue
            if equals_sign or next_word.lower() in ("true", "false"):
                raise UserError(
                    f"{program} takes {name} without a value: give {field.flag} to switch it on, {field.off} to switch "
                    "it off"
                )
            values.append((field, flag in by_flag))
            continue
        words = [word] if equals_sign else _leading_words(remaining, field.hint)
        values.append((field, _value(words, field, program)))
        del remaining[: 0 if equals_sign else len(words)]
    return values


def _leading_words(arguments: Sequence[str], hint: Any) -> list[str]:
    """Returns those of the words after a field's name that are its value."""
    end = next((i for i, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    if typing.get_origin(hint) is not tuple:
        return list(arguments[: min(end, 1)])
    parts = typing.get_args(hint)
    return list(arguments[: end if Ellipsis in parts else min(end, len(parts))])


def _value(words: Sequence[str], field: Field, program: str) -> Any:
    try:
        return convert(words, field.hint, "words")
    except ValueError:
        if not words:
            raise UserError(f"{program} {field.flag} needs a value: it takes {describe(field.hint)}") from None
        raise UserError(
            f"{program} {field.flag} takes {describe(field.hint)}, not {' '.join(words)!r:.80}; `{program} --help` "
            "lists all fields"
        ) from None


def as_declared(kind: type[T]) -> type[T]:
    """Decorates a class of settings, below `@dataclass`: its fields take what can mean only one value of their declared
    type. Such are a text for a path or a number, a number for a schedule, a list for a tuple, and one item for a tuple.

    Anything else that the type excludes raises a `UserError` naming class and field. A field that declares a protocol
    or a function takes everything.
    """
    declared: Any = kind  # no type says of a class that it has fields
    validate = getattr(kind, "__post_init__", None)

    def convert_and_validate(self: Any) -> None:
        for name, hint in field_types(declared).items():
            value = getattr(self, name, None)
            try:
                converted = convert(value, hint, "code")
            except ValueError:
                raise UserError(f"{type(self).__name__}'s {name} is {value!r:.80}: give {describe(hint)}") from None
            if converted is not value:
                object.__setattr__(self, name, converted)
        if validate is not None:
            validate(self)

    def refuse_old_names(cls: Any, *_: Any, **arguments: Any) -> Any:
        fields = field_types(cls)
        for name in arguments.keys() & RENAMED.keys() - fields.keys():
            if (new_name := RENAMED[name]) in fields:
                raise UserError(f"{cls.__name__} has no {name}; it is {new_name} now")
        return object.__new__(cls)

    declared.__post_init__ = convert_and_validate
    if not set(RENAMED.values()).isdisjoint(vars(kind).get("__annotations__", ())):
        declared.__new__ = refuse_old_names
    return kind


RENAMED = {  # a setting's name in recorded runs -> its name now, where its class has the new one and not the old one
    "rounds": "synchronous_rounds", "take_in": "ingest", "band": "saved_batches", "chunk": "batch_size",
    "shown": "logged_problems", "overlong": "when_too_long", "full_every": "full_version_every",
    "samples": "samples_per_batch", "first": "allowed_first_tokens", "never_first": "forbidden_first_tokens",
    "near": "near_duplicates", "by": "measure", "averaged": "weight_average", "distinct": "deduplicate",
    "compiled": "torch_compile", "low": "lower_bound", "high": "upper_bound", "eases_off": "throttled_side",
    "per": "loss_aggregation",
}  # fmt: skip


def renamed_flag(flag: str, candidates: Collection[str]) -> str | None:
    """Returns the flag among the candidates, or the one that switches it off, that an old flag is today; None: it is
    no old flag.
    """
    *parents, name = _dashed(flag).removeprefix("--").split(".")
    for off in ("no-", "") if name.startswith("no-") else ("",):
        options = [(part, *_new_parts(part)) for part in (*parents, name.removeprefix(off))]
        for *places, new_name in itertools.product(*options):
            if "--" + ".".join((*places, new_name)) in candidates:
                return "--" + ".".join((*places, off + new_name))
    return None


def _new_parts(part: str) -> tuple[str, ...]:
    name = RENAMED.get(part.replace("-", "_"))
    return () if name is None else (_dashed(name),)


def with_new_flags(arguments: Sequence[str], settings: Any) -> list[str]:
    """Returns the arguments of a recorded run with the flags that its settings have today."""
    candidates = {field.flag for field in fields_of(settings, by_code=True)}
    words = []
    for argument in arguments:
        flag, equals_sign, value = argument.partition("=")
        new_flag = renamed_flag(flag, candidates) if flag.startswith("--") else None
        words.append(argument if new_flag is None else f"{new_flag}{equals_sign}{value}")
    return words


def with_new_names(recorded_fields: Any, current_fields: Any) -> Any:
    """Returns recorded fields, as JSON, under the names that the current ones have."""
    if not isinstance(recorded_fields, Mapping) or not isinstance(current_fields, Mapping):
        return recorded_fields
    names = {old: RENAMED.get(old, old) if old not in current_fields else old for old in recorded_fields}
    names = {old: new if new in current_fields else old for old, new in names.items()}
    return {new: with_new_names(recorded_fields[old], current_fields.get(new)) for old, new in names.items()}


def make_recorded(kind: Callable[..., T], *arguments: Any, **fields: Any) -> T:
    """Calls a class as the source of an earlier recipe does: its fields may have their old names."""
    names = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    renamed = {name: RENAMED.get(name, name) for name in fields.keys() - names}
    return kind(*arguments, **{renamed.get(name, name): value for name, value in fields.items()})


FLAGS_ELSEWHERE = {  # names in TRL, verl and prime-rl -> the flags, or the command, that do the same here
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


def refuse_unknown(unknown_flags: Sequence[str], candidates: Collection[str], program: str) -> None:
    """Raises `UserError` when there are flags that no field has: it names all of them, and what each may mean among
    the candidates.
    """
    if unknown_flags:
        answers = [f"{flag}; {_suggestion(flag, candidates, program)}" for flag in dict.fromkeys(unknown_flags)]
        raise UserError(f"{program} has no field {' And no field '.join(answers)}")


def _suggestion(unknown_flag: str, candidates: Collection[str], program: str) -> str:
    """Returns what an unknown flag may mean: the new name of an old flag, what another library's flag of that name
    is here, a field of that name in another place, or a similar name in the same place.
    """
    if (new_flag := renamed_flag(unknown_flag, candidates)) is not None:
        return f"it is {new_flag} now."
    flag = _dashed(unknown_flag)
    place, _, name = flag.rpartition(".") if "." in flag else ("-", "", flag.lstrip("-"))
    names = {flag: flag.lstrip("-").rpartition(".")[2] for flag in candidates}
    translations = [word for word in FLAGS_ELSEWHERE.get(flag.lstrip("-"), ()) if word in names or word.startswith("`")]
    if translations:
        return f"did you mean {'both ' if translations[1:] else ''}{' and '.join(translations)}?"
    in_place = {names[flag]: flag for flag in names if (flag.rpartition(".")[0] or "-") == place}
    similar_flags = [in_place[n] for n in difflib.get_close_matches(name, in_place, n=1, cutoff=0.6)]
    similar_flags = similar_flags or sorted((flag for flag in names if names[flag] == name), key=len)[:1]
    similar_flags = similar_flags or difflib.get_close_matches(flag, names, n=1, cutoff=0.8)
    inner_flags = [candidate for candidate in names if candidate.startswith(f"{flag}.")]
    if inner_flags:
        part = flag.lstrip("-").replace("-", "_")
        path, code = part.split("."), "..."
        for i in reversed(range(len(path))):
            code = f"dataclasses.replace({'.'.join(['recipe', *path[:i]])}, {path[i]}={code})"
        return (
            f"{part} is a part of the recipe with fields of its own, such as {inner_flags[0]}. Another {part} is "
            f"chosen in code, in a file of your own: import the recipe, and `recipe = {code}`"
        )
    if similar_flags:
        return f"did you mean {similar_flags[0]}?"
    if place != "-" and in_place:
        return f"there is {', '.join(sorted(in_place.values()))}."
    return f"`{program} --help` lists all fields."


def replace_fields(settings: Any, values: Mapping[str, Any], prefix: str = "--") -> Any:
    """Returns the settings with fields set to the values of their flags."""
    changes = {}
    for f in dataclasses.fields(settings):
        flag, value = prefix + _dashed(f.name), getattr(settings, f.name)
        if flag in values:
            changes[f.name] = values[flag]
        elif dataclasses.is_dataclass(value) and any(name.startswith(f"{flag}.") for name in values):
            changes[f.name] = replace_fields(value, values, f"{flag}.")
    return dataclasses.replace(settings, **changes) if changes else settings


def refuse_without_effect(settings: Any, flags: Iterable[str], program: str) -> None:
    """Raises `UserError` when the field of one of the flags has no effect."""
    remedies = without_effect(settings)
    for flag in flags:
        if (remedy := _remedy(flag, remedies)) is not None:
            raise UserError(f"{program}: {flag} has no effect without {remedy}: give that too, or leave {flag} out")


def split_options(options: T, arguments: Sequence[str], program: str) -> tuple[T, list[str]]:
    """Returns a command's options as the arguments set them, and the other arguments, which set the recipe's fields."""
    by_flag = {field.flag: field for field in fields_of(options)}
    words, remaining = [], []
    iterator = iter(arguments)
    for argument in iterator:
        field = by_flag.get(_dashed(argument.partition("=")[0]))
        if field is None:
            remaining.append(argument)
            continue
        words.append(argument)
        if "=" not in argument and not field.is_switch:
            value = next(iterator, None)
            if value is None:
                raise UserError(f"{program} {argument} needs a value")
            words.append(value)
    values = parse_fields(words, options, program)
    updated_options: T = replace_fields(options, {field.flag: value for field, value in values})
    refuse_without_effect(updated_options, (field.flag for field, _ in values), program)
    return updated_options, remaining


def help_of(settings: Any, leading_flags: Sequence[str] = ()) -> str:
    """Returns a page about every field with an effect, its value and its meaning: the fields of `leading_flags` come
    first, the others under headings, and what would give further fields an effect at the end.
    """
    fields = fields_with_effect(settings)
    by_flag = {f.flag: f for f in fields}
    leading_fields = [by_flag[flag] for flag in leading_flags if flag in by_flag]
    blocks = [["what is set most:", *field_lines(leading_fields)]] if leading_flags else []
    by_place: dict[str, list[Field]] = {}
    for f in fields:
        if f.flag not in leading_flags:
            by_place.setdefault(f.place, []).append(f)
    roots = list(dict.fromkeys(["-", *map(_root, by_place)]))
    for place in sorted(by_place, key=lambda place: (roots.index(_root(place)), place)):
        blocks.append([_heading(place, by_place[place][0].settings), *field_lines(by_place[place])])
    by_remedy: dict[str, list[str]] = {}
    for flag, remedy in without_effect(settings).items():
        by_remedy.setdefault(remedy, []).append(flag)
    if by_remedy:
        lines = [line for remedy, names in by_remedy.items() for line in flag_lines(f"  {remedy}", ", ".join(names))]
        blocks.append(["there is more with:", *lines])
    return "\n\n".join("\n".join(block) for block in blocks)


def comments(kind: type) -> dict[str, str]:
    """Returns field -> the comment after it, with the comment lines that follow; empty without the source.

    So a setting is explained where it is defined and nowhere else: an inherited one by the class it comes from.
    """
    bases = (base for base in reversed(kind.__mro__) if "__dataclass_fields__" in vars(base))
    return {name: comment for base in bases for name, comment in _comments_in_source(base).items()}


def _comments_in_source(kind: type) -> dict[str, str]:
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
    last_lines = [line - 1 for line, _ in fields[1:]] + [max(line for line, _ in fields)]
    by_line = {
        t.start[0]: _COMMENT.sub("", t.string, count=1).strip()
        for t in tokenize.generate_tokens(StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    comment_lines = [n for n, line in enumerate(source.splitlines(), 1) if line.strip().startswith("#")]
    by_field = {}
    for (line, name), last_line in zip(fields, last_lines, strict=True):
        while last_line + 1 in comment_lines:
            last_line += 1
        by_field[name] = " ".join(by_line[n] for n in range(line, last_line + 1) if n in by_line)
    return by_field


def _root(place: str) -> str:
    return place.partition(".")[0]


def _heading(place: str, settings: Any) -> str:
    """Returns the place of settings and the first sentence of their class's docstring."""
    paragraph = " ".join(inspect.cleandoc(type(settings).__doc__ or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
    return textwrap.fill(f"{place.removeprefix('--').strip('-') or 'the run'}: {sentence}", _WIDTH)


def field_lines(fields: Sequence[Field]) -> list[str]:
    """Returns the lines of a help text about fields."""
    meanings = {kind: comments(kind) for kind in {type(f.settings) for f in fields}}
    lines = []
    for f in fields:
        meaning = meanings[type(f.settings)].get(f.name, "")
        choices = f"; {describe(f.hint)}" if typing.get_origin(f.hint) is Literal else ""
        lines += flag_lines(f"  {f.flag}", f"{meaning}{choices}{_default(f.value)}")
    return lines


def _default(value: Any) -> str:
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})".replace("\n", "\\n")


def flag_lines(flag: str, meaning: str) -> list[str]:
    """Returns the lines of a help text about a flag: its meaning stands at the right, or below a long flag."""
    lines = textwrap.wrap(meaning, _WIDTH - _INDENT, break_long_words=True, break_on_hyphens=False)
    lines = [f"{' ' * _INDENT}{line}" for line in lines]
    if not lines:
        return [flag]
    if len(flag) + 2 > _INDENT:
        return [flag, *lines]
    return [flag.ljust(_INDENT) + lines[0].lstrip(), *lines[1:]]
