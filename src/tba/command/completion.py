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
from tba.shipped import names
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
  local -a found
  found=("${(@f)$(tba complete "${(@)words[2,CURRENT]}" 2> /dev/null)}")
  if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _tba tba
""",
    "fish": """\
complete -c tba -a "(tba complete (commandline -opc)[2..] (commandline -ct) 2> /dev/null)"
""",
}


def script(shell: str) -> str:
    """Returns the script for a shell. Raises `UserError` for one that it is not known for."""
    if shell not in SHELLS:
        raise UserError(f"`tba completion` knows no shell {shell!r}: give one of {', '.join(SHELLS)}")
    return SHELLS[shell]


def candidates(words: Sequence[str]) -> list[str]:
    """Returns what the last of `words` (those after `tba`, the last one possibly empty) can become.

    Nothing: a file, or nothing that is known.
    """
    *before, begun = words or [""]
    name = " ".join(before[:2]) if " ".join(before[:2]) in COMMANDS else "".join(before[:1])
    command, after = COMMANDS.get(name), before[len(name.split()) :]
    if command is None:  # the first word, or the second of a command of two
        at = len(before)
        ways = (known.split() for known in COMMANDS)
        found = [way[at] for way in ways if way[:at] == before and len(way) > at]
    elif before[-1] == "--run":
        found = _runs()
    elif begun.startswith("-"):
        found = _options(command, after)
    else:
        places = command.takes.split()
        place = places[min(len(after), len(places) - 1)] if places else ""
        found = _of(place.strip("[].")) if len(after) < len(places) or "..." in place else []
    return [word for word in dict.fromkeys(found) if word.startswith(begun)]


def _of(place: str) -> list[str]:
    """Returns what a word that a command takes stands for; words in small letters stand for themselves."""
    known = {"RECIPE": names, "RUN": _runs}
    ways = (known.get(word, list)() if word.isupper() else [word] for word in place.split("|"))
    return [found for way in ways for found in way]


def _runs() -> list[str]:
    return sorted(str(path.parent) for path in Path("runs").glob("*/recipe.json"))


def _options(command: Command, given: Sequence[str]) -> list[str]:
    """Returns the options of a command, and the fields of a recipe that it is given."""
    found = [field.flag for options in command.option_classes() for field in fields_of(options())]
    found += [word.strip("[]") for word in command.shown.split() if word.strip("[").startswith("--")]
    return found + (_fields(given[0]) if command.fields and given and given[0] in names() else [])


def _fields(recipe: str) -> list[str]:
    """Returns the flags of a recipe's fields, from the cache if nothing of the package has changed since."""
    package = Path(__file__).parents[1]
    newest = max(path.stat().st_mtime_ns for path in package.rglob("*.py"))
    kept = cache_folder("completion") / f"{recipe}-{newest}.json"
    with suppress(OSError):
        return [str(flag) for flag in json.loads(kept.read_text(encoding="utf-8"))]
    from tba.fields import flags
    from tba.record.jsonl import write_json
    from tba.settings import find

    found = flags(find(recipe))
    with suppress(OSError):  # no room for it: it is computed each time
        for old in kept.parent.glob(f"{recipe}-*"):
            old.unlink(missing_ok=True)
        write_json(kept, found)
    return found
