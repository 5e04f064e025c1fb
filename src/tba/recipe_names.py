"""The recipes that come with the package: their names and descriptions, without loading any of them."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from tba.errors import UserError

VARIANT_MARK = "::"  # between the path of a study's file and a variant's name
_FOLDER = Path(__file__).parent / "recipes"


def recipe_names(folder: Path = _FOLDER) -> list[str]:
    """Returns all names, sorted."""
    return sorted(path.stem for path in folder.glob("*.py") if not path.name.startswith("_"))


def list_recipes() -> str:
    """Returns a line for each recipe: its name and its description."""
    names = recipe_names()
    return "\n".join(f"{name:{max(map(len, names))}}  {description_of(name)}" for name in names)


def description_of(name: str, folder: Path = _FOLDER) -> str:
    """Returns the description in the source of a recipe, or of another last call that a file assigns."""
    source = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
    call = [node.value for node in source.body if isinstance(node, ast.Assign)][-1]
    assert isinstance(call, ast.Call)
    return str(next(ast.literal_eval(word.value) for word in call.keywords if word.arg == "description"))


def require_recipe_name(name: str, or_run: bool = False) -> None:
    """Raises `UserError` when no recipe has this name; with `or_run` the message offers a run's folder too."""
    names = recipe_names()
    if Path(name).is_file():
        raise UserError(
            f"{name} is no recipe: give the path of a .py file that defines one; of a file of problems a recipe's task "
            f"is made, such as `tba.Jsonl(train={name!r})` (`tba example my_file` writes one)"
        )
    if or_run and "/" in name:
        raise UserError(f"there is no run at {name} (no recipe.json): give a run's folder, or the name of a recipe")
    if name not in names:
        close_names = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close_names[0]!r}?" if close_names else "`tba recipes` lists them."
        choices = ", ".join(names)
        folder = " or the folder of a run" if or_run else ""
        raise UserError(f"there is no recipe {name!r}; give one of {choices} or a path to a .py file{folder}; {hint}")
