"""The recipes and studies that come with the package: their names and descriptions, without loading any of them."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path
from typing import Literal, TypeAlias

from tba.errors import UserError

Kind: TypeAlias = Literal["recipe", "study"]
PACKAGES: dict[Kind, str] = {"recipe": "tba.recipes", "study": "tba.research.studies"}
MARK = "::"  # between a study's name or path and a variant's name


def names(kind: Kind = "recipe") -> list[str]:
    """Returns all names, sorted."""
    return sorted(path.stem for path in _folder(kind).glob("*.py") if not path.name.startswith("_"))


def description_of(name: str, kind: Kind = "recipe") -> str:
    """Returns the description in the source of a recipe or study."""
    source = ast.parse((_folder(kind) / f"{name}.py").read_text(encoding="utf-8"))
    assigned = [n for n in source.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == kind]
    made = assigned[-1].value
    assert isinstance(made, ast.Call)
    return str(next(ast.literal_eval(word.value) for word in made.keywords if word.arg == "description"))


def require_shipped(name: str, kind: Kind, or_run: bool = False) -> None:
    """Raises `UserError` when none has this name; or_run: it says that a run's folder would do as well."""
    shipped = names(kind)
    if Path(name).is_file():
        raise UserError(
            f"{name} is no {kind}: give the path of a .py file that defines one; of a file of problems a recipe's task "
            f"is made, such as `tba.Jsonl(train={name!r})` (`tba example my_file` writes one)"
        )
    if name not in shipped:
        near = difflib.get_close_matches(name, shipped, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"`tba {PACKAGES[kind].rpartition('.')[2]}` lists them."
        there = ", ".join(shipped)
        run = " or the folder of a run" if or_run else ""
        raise UserError(f"there is no {kind} {name!r}; give one of {there} or a path to a .py file{run}; {hint}")


def _folder(kind: Kind) -> Path:
    return Path(__file__).parent.joinpath(*PACKAGES[kind].split(".")[1:])
