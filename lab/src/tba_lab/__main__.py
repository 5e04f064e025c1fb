"""The laboratory's command line: `tba-lab study STUDY`, `tba-lab studies`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tba import field_names
from tba.config_file import with_config
from tba.errors import TbaError, UserError
from tba.fields import field_lines, fields_of, flags_in, refuse_unknown, split_options
from tba.recipe_names import description_of, recipe_names
from tba_lab import STUDIES

USAGE = """\
tba-lab study STUDY [--seeds 0,1,2] [--only VARIANTS] [--out DIR] [--again changed|failed|all] [--field value ...]
                    run variants x seeds (a name, or a path to a .py file), make tables and plots
tba-lab studies     list the studies
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 2 after one sentence for bad input."""
    command, *command_arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if command == "studies":
            studies = recipe_names(STUDIES)
            print("\n".join(f"{name:{max(map(len, studies))}}  {description_of(name, STUDIES)}" for name in studies))
            sys.stdout.flush()
            return 0
        if {"--help", "-h", "help"} & {command, *command_arguments}:
            from tba_lab.command import StudyOptions

            print(USAGE, *field_lines(list(fields_of(StudyOptions()))), sep="\n")
            return 0
        if command != "study":
            raise UserError(f"there is no command {command!r}: give study or studies")
        if not command_arguments or command_arguments[0].startswith("-"):
            raise UserError("`tba-lab study STUDY` needs a study's name or a path to a .py file first")
        return _study(command_arguments[0], with_config(command_arguments[1:]))
    except BrokenPipeError:  # the reader has closed the pipe (`tba-lab studies | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail
        return 0
    except TbaError as error:
        print(f"tba-lab: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def _study(name: str, arguments: list[str]) -> int:
    """Run a study; returns its exit code. Raises `UserError` for unknown fields before anything is loaded."""
    options_named = field_names.of_class_in(Path(__file__).with_name("command.py"), "StudyOptions")
    places = (options_named, field_names.of_any_recipe())
    unknown = [flag for flag in flags_in(arguments) if not any(field_names.has(names, flag) for names in places)]
    refuse_unknown(unknown, [flag for names in places for flag in field_names.flags_of(names)], f"tba-lab study {name}")
    from tba_lab.command import StudyOptions, run_study

    options, fields = split_options(StudyOptions(), arguments, "tba-lab study")
    return run_study(name, options, fields)


if __name__ == "__main__":
    sys.exit(main())
