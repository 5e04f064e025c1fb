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
# Errors of a path that the user gave, whatever command opens it.
PATH_ERRORS = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
MIN_MEMORY = 1_200_000_000  # bytes that the libraries map; with less, OpenBLAS tries for ever to get them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line; returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ["RUST_BACKTRACE"] = "0"  # a tokenizer that gets no memory waits for its backtrace for ever
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
        if error.errno not in PATH_ERRORS or error.filename is None:
            raise
        path_text = printable(str(error.filename), newlines=False)
        print(f"tba: {path_text} cannot be read or written ({error.strerror}): give another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tba: stopped", file=sys.stderr)
        return 130


def _refuse_little_memory() -> None:
    """Raises `UserError` where the limit of this process is below the memory that loading the libraries takes."""
    import resource

    from tba.errors import UserError

    memory_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory_limit != resource.RLIM_INFINITY and memory_limit < MIN_MEMORY:
        raise UserError(
            f"this process may have {memory_limit / 1e9:.1f} GB of memory (`ulimit -v`), and its libraries alone map "
            f"{MIN_MEMORY / 1e9:.1f}: raise the limit"
        )


def _open_standard_streams() -> None:
    """Opens standard streams that the caller had closed (`tba train >&-`). Without this the next file that is opened
    would get the number of a standard stream, and be printed into.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (null_device := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null_device, True)
    os.close(null_device)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def run(arguments: list[str]) -> int:
    """Run the command that the arguments begin with; returns its exit code."""
    from tba.command.table import COMMANDS

    name, words = arguments[0], arguments[1:]
    if name == "complete":  # for the scripts of `tba completion`
        from tba.command.completion import candidates

        print("\n".join(candidates(words)))
        return 0
    if words and f"{name} {words[0]}" in COMMANDS:
        name, words = f"{name} {words[0]}", words[1:]
    if HELP & set(words) and _print_help(name, words):
        return 0
    command = _find_command(name, words)
    if command.sets_fields or name == "search":  # they load torch
        _refuse_little_memory()
    result = _call(command, _with_config_file(words))
    if isinstance(result, str):
        print(result)
    return 0 if isinstance(result, str) else result


def _find_command(name: str, words: Sequence[str]) -> Command:
    from tba.command.table import COMMANDS, commands_named
    from tba.errors import UserError

    if name in COMMANDS:
        return COMMANDS[name]
    if subcommands := [command.name.partition(" ")[2] for command in commands_named(name)]:
        problem = f"there is no `tba {name} {words[0]}`" if words else f"`tba {name}` needs to know what to do"
        raise UserError(f"{problem}: use one of {', '.join(subcommands)}; `tba {name} --help` shows how")
    command_names = dict.fromkeys(full_name.partition(" ")[0] for full_name in COMMANDS)
    raise UserError(f"there is no command {name!r}: use one of {', '.join(command_names)}; `tba --help` shows how")


def _print_help(name: str, words: Sequence[str]) -> bool:
    """Print a command's help. Returns False when a recipe is named, because its fields are printed later."""
    from tba.command.table import COMMANDS, commands_named, help_text

    if not any(commands_named(name)):
        _find_command(name, words)  # says that there is no such command
    print(help_text(name), end="\n\n")
    takes_recipe = name in COMMANDS and COMMANDS[name].arguments.startswith("RECIPE")
    return not (takes_recipe and not words[0].startswith("-"))


def _with_config_file(arguments: list[str]) -> list[str]:
    if not any(argument.partition("=")[0] == "--config" for argument in arguments):
        return arguments
    from tba.config_file import with_config

    return with_config(arguments)


def _call(command: Command, arguments: list[str]) -> Any:
    """Calls the command's function with the values of the arguments, and returns its result."""
    from tba.errors import UserError

    words, fields = _split_words(command, arguments)
    options = []
    if command.options:
        from tba.fields import split_options

        option_values, fields = split_options(next(command.option_classes())(), fields, f"tba {command.name}")
        options = [option_values]
    if command.sets_fields:
        _refuse_unknown_fields(command, words, options, fields)
    for name, meaning in command.required_options.items():
        if getattr(options[0], name) is None and not HELP & set(fields):
            raise UserError(f"tba {command.name} needs --{name} {meaning}")
    if command.sets_fields:
        words.append(fields)
    elif fields:
        raise UserError(f"`{command.synopsis}` does not take {fields[0]!r}: `tba {command.name} --help` explains it")
    return command.load_function()(*words, *options)


def _refuse_unknown_fields(
    command: Command, words: Sequence[Any], options: Sequence[Any], arguments: Sequence[str]
) -> None:
    """Raises `UserError` for fields that the recipe, run or file does not have, before it is loaded."""
    from tba import field_names
    from tba.fields import fields_of, flags_in, refuse_unknown

    source, program = "".join(map(str, words[:1])), " ".join(map(str, ["tba", command.name, *words[:1]]))
    if command.name == "import":  # a new run's recipe; other runs have their fields
        source = options[0].recipe or ""
        program += f" --recipe {source}"
    settings = command.settings_class_for(source)
    names = field_names.of_class(settings) if settings else field_names.of_recipe(source)
    candidates = [*(field.flag for values in options for field in fields_of(values)), *field_names.flags_of(names)]
    unknown_flags = [flag for flag in flags_in(arguments) if flag not in HELP and not field_names.has(names, flag)]
    refuse_unknown(unknown_flags, candidates, program)


def _split_words(command: Command, arguments: list[str]) -> tuple[list[Any], list[str]]:
    """Returns the values of the words before the first option, for the command's function, and all other arguments."""
    from tba.command.table import WORD_MEANINGS
    from tba.errors import UserError

    word_count = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    words, values = arguments[:word_count], list[Any]()
    for place in command.arguments.split():
        kind = place.strip("[].")
        if not words and not place.startswith("["):
            meaning = WORD_MEANINGS.get(kind) or f"one of {kind.replace('|', ', ')}"
            raise UserError(f"`{command.synopsis}` needs {meaning} first")
        takes_all = place.endswith(("...", "...]"))
        place_words, words = (words, []) if takes_all else (words[:1], words[1:])
        for word in place_words:
            _refuse_missing(kind, word, command)
        place_values = [Path(word) for word in place_words] if kind in ("RUN", "FILE") else place_words
        values += [place_values] if takes_all else place_values
    return values, [*words, *arguments[word_count:]]


def _refuse_missing(kind: str, name: str, command: Command) -> None:
    """Raises `UserError` for a recipe or a run that is not there, before anything heavy is loaded."""
    from tba.errors import UserError
    from tba.recipe_names import VARIANT_MARK, require_recipe_name

    if kind == "RUN" and command.name != "import" and not Path(name).exists():
        raise UserError(f"{name}: there is no such run; give the directory of one, for example runs/NAME")
    if kind not in ("RECIPE", "RECIPE|RUN") or VARIANT_MARK in name or name.endswith(".py"):
        return
    is_run = (Path(name) / "recipe.json").is_file()
    if is_run and kind == "RECIPE":
        raise UserError(f"`{command.synopsis}` needs a recipe, and {name} is a run: `tba resume {name}` continues it")
    if not is_run:
        require_recipe_name(name, or_run=kind == "RECIPE|RUN")


if __name__ == "__main__":
    sys.exit(main())
