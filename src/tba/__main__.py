"""The command line: reads the arguments of a command (`tba.command.table` has them all) and calls its function.

Invariant: bad input ends in one sentence on standard error and exit code 2, without a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.command.table import Command

HELP = {"-h", "--help"}
# errors of a path that was given, whatever command opens it
UNUSABLE = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
LEAST_MEMORY = 1_200_000_000  # bytes that its libraries map; with less, one of them tries for ever to get it (OpenBLAS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line; returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ["RUST_BACKTRACE"] = "0"  # of a tokenizer that gets no memory it waits for ever
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    from tba.errors import TbaError, UserError
    from tba.record.log import spell_out_control_characters
    from tba.record.text import printable

    spell_out_control_characters()
    try:
        if not arguments or arguments[0] in HELP or arguments[0] == "help":
            from tba.command.table import usage

            print(usage())
            code = 0
        elif arguments[0] in ("--version", "-V", "version"):
            from tba.runtime.program import version

            print(f"tba {version()}")
            code = 0
        else:
            for argument in arguments:
                if any("\ud800" <= letter <= "\udfff" for letter in argument):
                    raise UserError(f"the argument {argument!r} is not valid UTF-8: give names that are")
            code = run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"tba: {printable(str(error), newlines=False)}", file=sys.stderr)  # it may quote anything
        return 2
    except TbaError as error:
        print(f"tba: {printable(str(error), sys.maxsize)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe (`tba recipes | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail
        return 0
    except MemoryError:
        print(
            "tba: this process could not get the memory it needs: give it more (`ulimit -v`, a container's limit, the "
            "machine's), or give smaller models or files",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            print(f"tba: the output cannot be written ({error.strerror}): send it elsewhere", file=sys.stderr)
            return 2
        if error.errno not in UNUSABLE or error.filename is None:
            raise
        named = printable(str(error.filename), newlines=False)
        print(f"tba: {named} cannot be read or written ({error.strerror}): give another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tba: stopped", file=sys.stderr)
        return 130


def _refuse_little_memory() -> None:
    """Raises `UserError` where this process may not get the memory that loading takes."""
    import resource

    from tba.errors import UserError

    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < LEAST_MEMORY:
        raise UserError(
            f"this process may have {most / 1e9:.1f} GB of memory (`ulimit -v`), and its libraries alone map "
            f"{LEAST_MEMORY / 1e9:.1f}: raise the limit"
        )


def _open_standard_streams() -> None:
    """Open those that whoever started this had closed (`tba train >&-`): otherwise the next file that is opened would
    be taken for one of them, and printed into.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            opened = os.fdopen(number, mode, closefd=False)
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)


def run(arguments: list[str]) -> int:
    """Run the command that the arguments begin with; returns its exit code."""
    from tba.command.table import COMMANDS

    name, rest = arguments[0], arguments[1:]
    if name == "complete":  # for the scripts of `tba completion`
        from tba.command.completion import candidates

        print("\n".join(candidates(rest)))
        return 0
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if HELP & set(rest) and _helped(name, rest):
        return 0
    command = _command(name, rest)
    if command.fields or name == "search":  # they load torch
        _refuse_little_memory()
    done = _called(command, _configured(rest))
    if isinstance(done, str):
        print(done)
    return 0 if isinstance(done, str) else done


def _command(name: str, rest: Sequence[str]) -> Command:
    from tba.command.table import COMMANDS, named
    from tba.errors import UserError

    if name in COMMANDS:
        return COMMANDS[name]
    if inner := [command.name.partition(" ")[2] for command in named(name)]:
        given = f"there is no `tba {name} {rest[0]}`" if rest else f"`tba {name}` needs to know what to do"
        raise UserError(f"{given}: use one of {', '.join(inner)}; `tba {name} --help` shows how")
    known = dict.fromkeys(known.partition(" ")[0] for known in COMMANDS)
    raise UserError(f"there is no command {name!r}: use one of {', '.join(known)}; `tba --help` shows how")


def _helped(name: str, rest: Sequence[str]) -> bool:
    """Print a command's help. Returns False when a recipe is named, whose fields follow."""
    from tba.command.table import COMMANDS, help_of, named

    if not any(named(name)):
        _command(name, rest)  # says that there is no such command
    print(help_of(name), end="\n\n")
    takes_recipe = name in COMMANDS and COMMANDS[name].takes.startswith("RECIPE")
    return not (takes_recipe and not rest[0].startswith("-"))


def _configured(arguments: list[str]) -> list[str]:
    if not any(argument.partition("=")[0] == "--config" for argument in arguments):
        return arguments
    from tba.config_file import with_config

    return with_config(arguments)


def _called(command: Command, arguments: list[str]) -> Any:
    """Returns what the command's function returns, called with what the arguments give."""
    from tba.errors import UserError

    words, fields = _taken(command, arguments)
    options = []
    if command.options:
        from tba.fields import split_options

        chosen, fields = split_options(next(command.option_classes())(), fields, f"tba {command.name}")
        options = [chosen]
    if command.fields:
        _refuse_unknown_fields(command, words, options, fields)
    for name, what in command.needs.items():
        if getattr(options[0], name) is None and not HELP & set(fields):
            raise UserError(f"tba {command.name} needs --{name} {what}")
    if command.fields:
        words.append(fields)
    elif fields:
        raise UserError(
            f"`{command.synopsis}` does not take {fields[0]!r}: `tba {command.name} --help` says what it does"
        )
    return command.loaded()(*words, *options)


def _refuse_unknown_fields(
    command: Command, words: Sequence[Any], options: Sequence[Any], arguments: Sequence[str]
) -> None:
    """Raises `UserError` for fields that the command cannot set of what it was given, before that is loaded."""
    from tba import field_names
    from tba.fields import fields_of, flags_in, refuse_unknown

    source, program = "".join(map(str, words[:1])), " ".join(map(str, ["tba", command.name, *words[:1]]))
    if command.name == "import":  # a new run's recipe; other runs have their fields
        source = options[0].recipe or ""
        program += f" --recipe {source}"
    settings = command.settings_for(source)
    names = field_names.of_class(settings) if settings else field_names.of_recipe(source)
    candidates = [*(field.flag for chosen in options for field in fields_of(chosen)), *field_names.flags(names)]
    unknown = [flag for flag in flags_in(arguments) if flag not in HELP and not field_names.has(names, flag)]
    refuse_unknown(unknown, candidates, program)


def _taken(command: Command, arguments: list[str]) -> tuple[list[Any], list[str]]:
    """Returns what the words before the first option give the command's function, and the arguments that are left."""
    from tba.command.table import MEANT
    from tba.errors import UserError

    end = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    words, found = arguments[:end], list[Any]()
    for place in command.takes.split():
        kind = place.strip("[].")
        if not words and not place.startswith("["):
            what = MEANT.get(kind) or f"one of {kind.replace('|', ', ')}"
            raise UserError(f"`{command.synopsis}` needs {what} first")
        many = place.endswith(("...", "...]"))
        own, words = (words, []) if many else (words[:1], words[1:])
        for word in own:
            _refuse_missing(kind, word, command)
        read = [Path(word) for word in own] if kind in ("RUN", "FILE") else own
        found += [read] if many else read
    return found, [*words, *arguments[end:]]


def _refuse_missing(kind: str, name: str, command: Command) -> None:
    """Raises `UserError` for a recipe or a run that is not there, before anything heavy is loaded."""
    from tba.errors import UserError
    from tba.shipped import MARK, require_shipped

    if kind == "RUN" and command.name != "import" and not Path(name).exists():
        raise UserError(f"{name}: there is no such run; give the directory of one, for example runs/NAME")
    if kind not in ("RECIPE", "RECIPE|RUN") or MARK in name or name.endswith(".py"):
        return
    is_run = (Path(name) / "recipe.json").is_file()
    if is_run and kind == "RECIPE":
        raise UserError(f"`{command.synopsis}` needs a recipe, and {name} is a run: `tba resume {name}` continues it")
    if not is_run:
        require_shipped(name, or_run=kind == "RECIPE|RUN")


if __name__ == "__main__":
    sys.exit(main())
