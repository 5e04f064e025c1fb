"""`tba completion SHELL`: a script with which a shell completes commands, recipes, runs, options and fields.

The script asks `tba complete WORD ...` at each Tab. Fields of a recipe that comes with the package are computed once,
in some seconds, and kept in the cache until the package changes; those of a recipe in a .py file are not completed,
because that would execute it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

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
_TAKES = {  # what the first word after a command is
    **dict.fromkeys(("train", "check", "sample", "eval", "sft"), "recipe"),
    "study": "study",
    **dict.fromkeys(("show", "report", "push", "replay", "import"), "run"),
}
_WORDS = {"red-team": ("world", "classifier", "eval", "plot"), "model": ("smollm2",), "completion": tuple(SHELLS)}
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
    if not before:
        found = sorted(set(re.findall(r"^  tba ([\w-]+)", usage, flags=re.MULTILINE)))
    elif before[-1] in _OF_RUNS:
        found = _runs()
    elif begun.startswith("-"):
        found = _options(before, usage)
    elif len(before) == 1 or before[0] in ("show", "report"):
        found = _first(before[0])
    else:
        found = []
    return [word for word in found if word.startswith(begun)]


def _first(command: str) -> list[str]:
    takes = _TAKES.get(command)
    if takes == "run":
        return _runs()
    return names("study" if takes == "study" else "recipe") if takes else list(_WORDS.get(command, ()))


def _runs() -> list[str]:
    return sorted(str(path.parent) for path in Path("runs").glob("*/recipe.json"))


def _options(before: list[str], usage: str) -> list[str]:
    """Returns the options in the lines of the usage about the command, and the fields of a recipe that it is given."""
    lines = "\n".join(about(before[0], usage))
    found = dict.fromkeys(re.findall(r"--[a-z][\w-]*", lines.replace("--field", "")))
    named = before[1] if len(before) > 1 else ""
    if _TAKES.get(before[0]) == "recipe" and named in names():
        found |= dict.fromkeys(_fields(named))
    return list(found)


def _fields(recipe: str) -> list[str]:
    """Returns the flags of a recipe's fields, from the cache if nothing of the package has changed since."""
    package = Path(__file__).parents[1]
    newest = max(path.stat().st_mtime_ns for path in package.rglob("*.py"))
    kept = cache_folder("completion") / f"{recipe}-{newest}.txt"
    with suppress(OSError):
        return kept.read_text(encoding="utf-8").split()
    from tba.fields import flags
    from tba.settings import find

    found = flags(find(recipe))
    with suppress(OSError):  # no room for it: it is computed each time
        kept.parent.mkdir(parents=True, exist_ok=True)
        for old in kept.parent.glob(f"{recipe}-*"):
            old.unlink(missing_ok=True)
        with NamedTemporaryFile("w", dir=kept.parent, delete=False, encoding="utf-8") as file:
            file.write("\n".join(found))
        os.replace(file.name, kept)
    return found
