"""`tba example [NAME]`: the examples that come with the package, listed, or written to the present folder."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tba.errors import UserError

_PACKAGE = Path(__file__).parents[1]
_IN_A_WHEEL, _IN_A_CLONE = _PACKAGE / "examples", _PACKAGE.parents[1] / "examples"
_FOLDER = _IN_A_WHEEL if _IN_A_WHEEL.is_dir() else _IN_A_CLONE


def write_example(name: str | None = None) -> str:
    """Write an example and the files that it names to the present folder. Returns a line that says so; without a name
    a line for each example.

    Raises `UserError` for an unknown name, and where a file would be replaced.
    """
    paths = _examples()
    if name is None:
        return "\n".join(f"{name:{max(map(len, paths))}}  {_first_line(path)}" for name, path in paths.items())
    if name.partition(".")[0] not in paths:
        raise UserError(f"there is no example {name!r}: give one of {', '.join(paths)}")
    main_file = paths[name.partition(".")[0]]
    main_text = main_file.read_text(encoding="utf-8")
    files = [main_file, *(file for file in sorted(_FOLDER.iterdir()) if file.name in main_text and file != main_file)]
    for file in files:
        if Path(file.name).exists():
            raise UserError(f"{file.name} is here already: move it away, or run this in another folder")
    for file in files:
        text = file.read_text(encoding="utf-8").replace("examples/", "")  # so that its commands work from here
        Path(file.name).write_text(text, encoding="utf-8")
    program = "jupyter lab" if main_file.suffix == ".ipynb" else "tba train" if "\nrecipe = " in main_text else "python"
    return f"wrote {', '.join(file.name for file in files)}; now: {program} {main_file.name}"


def _examples() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_FOLDER.glob("*")) if path.suffix in (".py", ".ipynb")}


def _first_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return str(json.loads(text)["cells"][0]["source"][0]).lstrip("# ").strip()
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
