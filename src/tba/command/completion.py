"""`tba completion SHELL`: a script with which a shell completes commands, recipes, runs, options and fields.

The script asks `tba complete WORD ...` at each Tab. Fields of a recipe that comes with the package are computed once,
in some seconds, and kept in the cache until the package changes; those of a recipe in a .py file are not completed,
because that would execute it.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from tba.command.help import about
from tba.errors import UserError
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
_OF_RUNS = ("--resume", "--run")  # options whose value is a run


def script(shell: str) -> str:
    """Returns the script for a shell. Raises `UserError` for one that it is not known for."""
    if shell not in SHELLS:
        raise UserError(f"`tba completion` knows no shell {shell!r}: give one of {', '.join(SHELLS)}")
    return SHELLS[shell]


def candidates(words: list[str], usage: str) -> list[str]:
    """Returns what the last of `words` (those after `tba`, the last one possibly empty) can become.

    Nothing: a file, or nothing that is known.
    """
    *before, begun = words or [""]
    lines = "\n".join(about(before[0], usage)) if before else ""
    if not before:
        found = sorted(set(re.findall(r"^  tba ([\w-]+)", usage, flags=re.MULTILINE)))
    elif before[-1] in _OF_RUNS:
        found = _runs()
    elif begun.startswith("-"):
        found = _options(before, lines)
    elif len(before) == 1 or "[RUN ...]" in lines:
        found = [
            word for kind in re.findall(r"^  tba [\w-]+ ([\w|-]+)", lines, flags=re.MULTILINE) for word in _of(kind)
        ]
    else:
        found = []
    return [word for word in dict.fromkeys(found) if word.startswith(begun)]


def _of(kind: str) -> list[str]:
    """Returns what the first word after a command in the usage stands for; words that stand for themselves, as such."""
    if kind.isupper():
        known = {"RECIPE": names, "RUN": _runs}
        return [word for one in kind.split("|") for word in known.get(one, list)()]
    return [] if kind.startswith("-") else kind.split("|")


def _runs() -> list[str]:
    return sorted(str(path.parent) for path in Path("runs").glob("*/recipe.json"))


def _options(before: list[str], lines: str) -> list[str]:
    """Returns the options in a command's lines of the usage, and the fields of a recipe that it is given."""
    found = re.findall(r"--[a-z][\w-]*", lines.replace("--field", ""))
    takes_fields = "--field" in lines and len(before) > 1 and before[1] in names()
    return found + (_fields(before[1]) if takes_fields else [])


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
