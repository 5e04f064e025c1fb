"""`tba completion SHELL`: a script with which a shell completes commands, recipes, runs, options and fields.

The script asks `tba complete WORD ...` at each Tab. Fields of a recipe that comes with the package are computed once,
in some seconds, and kept in the cache until the package changes; those of a recipe in a .py file are not completed,
because that would execute it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tba.command.table import COMMANDS, Command
from tba.errors import UserError
from tba.fields import fields_of
from tba.recipe_names import recipe_names
from tba.weights.atomic_dir import cache_folder

SHELLS = {
    "bash": """\
_tba() {
  local IFS=$'\\n'
  COMPREPLY=($(tba complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
}
complete -o default -F _tba tba
""",
    "zsh": """\
#compdef tba
_tba() {
  local -a candidates
  candidates=("${(@f)$(tba complete "${(@)words[2,CURRENT]}" 2> /dev/null)}")
  if [[ -n "$candidates" ]]; then compadd -a candidates; else _files; fi
}
compdef _tba tba
""",
    "fish": """\
complete -c tba -a "(tba complete (commandline -opc)[2..] (commandline -ct) 2> /dev/null)"
""",
}


def script(shell: str) -> str:
    """Returns the completion script of a shell. Raises `UserError` for a shell that has none."""
    if shell not in SHELLS:
        raise UserError(f"`tba completion` knows no shell {shell!r}: give one of {', '.join(SHELLS)}")
    return SHELLS[shell]


def candidates(words: Sequence[str]) -> list[str]:
    """Returns the completions of the last of `words`, which follow `tba`; the last may be empty.

    An empty list leaves the word to the shell, which completes names of files.
    """
    *complete_words, prefix = words or [""]
    two_words = " ".join(complete_words[:2])
    name = two_words if two_words in COMMANDS else "".join(complete_words[:1])
    command, arguments = COMMANDS.get(name), complete_words[len(name.split()) :]
    if command is None:  # the first word, or the second of a command of two
        n = len(complete_words)
        names_as_words = (full_name.split() for full_name in COMMANDS)
        completions = [parts[n] for parts in names_as_words if parts[:n] == complete_words and len(parts) > n]
    elif complete_words[-1] == "--run":
        completions = _run_folders()
    elif prefix.startswith("-"):
        completions = _options(command, arguments)
    else:
        places = command.arguments.split()
        place = places[min(len(arguments), len(places) - 1)] if places else ""
        completions = _values_of(place.strip("[].")) if len(arguments) < len(places) or "..." in place else []
    return [word for word in dict.fromkeys(completions) if word.startswith(prefix)]


def _values_of(place: str) -> list[str]:
    """Returns the values of an argument such as `RECIPE|RUN`, of which words in small letters are values themselves."""
    sources = {"RECIPE": recipe_names, "RUN": _run_folders}
    alternatives = (sources.get(word, list)() if word.isupper() else [word] for word in place.split("|"))
    return [value for values in alternatives for value in values]


def _run_folders() -> list[str]:
    return sorted(str(path.parent) for path in Path("runs").glob("*/recipe.json"))


def _options(command: Command, arguments: Sequence[str]) -> list[str]:
    """Returns the flags of a command's options, and of the fields of the recipe in its arguments."""
    flags = [field.flag for options in command.option_classes() for field in fields_of(options())]
    flags += [word.strip("[]") for word in command.usage_options.split() if word.strip("[").startswith("--")]
    is_recipe = command.sets_fields and arguments and arguments[0] in recipe_names()
    return flags + (_recipe_flags(arguments[0]) if is_recipe else [])


def _recipe_flags(recipe: str) -> list[str]:
    """Returns the flags of a recipe's fields, from the cache if nothing of the package has changed since."""
    modified_ns = max(path.stat().st_mtime_ns for path in Path(__file__).parents[1].rglob("*.py"))
    cache_path = cache_folder("completion") / f"{recipe}-{modified_ns}.json"
    with suppress(OSError):
        return [str(flag) for flag in json.loads(cache_path.read_text(encoding="utf-8"))]
    from tba.fields import flags
    from tba.record.jsonl import write_json
    from tba.settings import find

    field_flags = flags(find(recipe))
    with suppress(OSError):  # without room for the cache the flags are computed each time
        for stale_path in cache_path.parent.glob(f"{recipe}-*"):
            stale_path.unlink(missing_ok=True)
        write_json(cache_path, field_flags)
    return field_flags
