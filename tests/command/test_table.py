"""The table of commands, of which usage, help and completion are made."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from tba.command.table import COMMANDS, usage
from tba.fields import fields_of


@pytest.mark.parametrize("name", COMMANDS)
def test_the_function_of_a_command_takes_what_the_table_gives_it_and_what_is_needed_is_an_option(name: str) -> None:
    command = COMMANDS[name]
    fields, options = ["fields"] * command.sets_fields, ["options"] * bool(command.options)
    inspect.signature(command.load_function()).bind(*command.arguments.split(), *fields, *options)
    read = {f"--{field.name}" for field in fields_of(next(command.option_classes())())} if command.options else set()
    assert {f"--{need}" for need in command.required_options} <= read


def test_the_usage_has_every_command_once_in_lines_that_a_terminal_holds_and_loads_nothing_heavy() -> None:
    code = "import sys; from tba.__main__ import main; main([]); print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{usage()}\nFalse False\n"
    lines = usage().splitlines()
    assert max(map(len, lines)) <= 120
    for command in COMMANDS.values():
        assert sum(f"{line} ".startswith(f"  {command.synopsis} ") for line in lines) == 1
