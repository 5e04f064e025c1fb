"""What a user's code gives and raises: problems that are checked, and errors that become a sentence."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tba.errors import UserError
from tba.types import Problem, Split, python_values, quote

_STANDARD_ERROR = 2  # the descriptor, which a forked process has whatever else it has closed


def problems_of(task: Any, split: Split) -> Sequence[Problem]:
    """Returns a task's problems. Raises `UserError` when it gives none, or something else."""
    try:
        value: object = task.problems(split)
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise UserError(f"problems({split!r}) of task {task.name} gave {value!r:.80}: return a list of tba.Problem")
        problems = value if isinstance(value, list | tuple) else list(value)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise user_code_error(f"problems({split!r}) of task {task.name}", error) from error
    for number, problem in enumerate(problems):
        if flaw := _flaw(problem):
            raise UserError(f"problem {number} of problems({split!r}) of task {task.name} {flaw}")
    if not problems:
        raise UserError(f"task {task.name} has no problems for {split!r}: return some from problems({split!r})")
    return problems


def _flaw(problem: object) -> str:
    """Returns what is wrong with a problem and what to do about it, or an empty text."""
    if not isinstance(problem, Problem):
        return f"is {problem!r:.80}: make each a tba.Problem(prompt, fields)"
    prompt: object = problem.prompt
    fields: object = problem.fields
    demonstration: object = problem.demonstration
    is_chat = isinstance(prompt, list | tuple) and prompt and all(map(_is_message, prompt))
    if not isinstance(prompt, str) and not is_chat:
        return f"has the prompt {prompt!r:.80}: give a text, or chat messages, each with a role and a content"
    if not isinstance(fields, Mapping):
        return f"has the fields {fields!r:.80}: give a dictionary of what the reward needs, by name"
    if (name := next((name for name, value in fields.items() if not _is_json(value)), None)) is not None:
        return f"has the field {name!r} with {fields[name]!r:.80}: make it of texts, numbers, lists, dictionaries"
    are_turns = isinstance(demonstration, tuple) and all(isinstance(turn, str) for turn in demonstration)
    if not isinstance(demonstration, str | None) and not are_turns:
        return f"has the demonstration {demonstration!r:.80}: give a text, None, or a tuple of the turns of an episode"
    return ""


def _is_json(value: object) -> bool:
    try:
        json.dumps(python_values(value))
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def user_code_error(function_name: str, error: BaseException) -> UserError:
    """Returns an error whose sentence names a user's own function, what it raised, and the line of code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return UserError(
        f"{function_name} failed: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}: {frame.line})"
        "; mend that line"
    )


def print_error(error: BaseException) -> None:
    """Prints the error that ends this process to standard error: bad input as its sentence, other errors with their
    traceback. Control characters are spelt out, since texts of others may be in it; a closed output is passed over.
    """
    is_bad_input = isinstance(error, UserError)
    text = f"tba: {error}" if is_bad_input else "".join(traceback.format_exception(error)).rstrip("\n")
    lines = (line if line.isprintable() else quote(line, sys.maxsize)[1:-1] for line in text.split("\n"))
    with suppress(OSError):  # a full disk, an output that is closed
        os.write(_STANDARD_ERROR, "".join(f"{line}\n" for line in lines).encode(errors="replace"))
