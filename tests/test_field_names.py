"""The fields of a recipe by its source alone: those of the loaded recipe, and unknown ones are refused at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tba import field_names
from tba.fields import fields_of
from tba.recipe_names import recipe_names
from tba.settings import find

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(str(path) for path in (ROOT / "examples").glob("*.py") if "\nrecipe = " in path.read_text())
OF_A_USER = """
from dataclasses import dataclass, replace
import tba
from tba.recipes.quickstart import recipe as quickstart

@dataclass(frozen=True)
class Base:
    width: int = 3

@dataclass(frozen=True)
class Mine(Base):
    path: str | None = None
    size: tba.ScratchModel = tba.ScratchModel()

def made():
    return quickstart

recipe = replace(quickstart, task=Mine())
"""


@pytest.mark.parametrize("name", [*recipe_names(), *EXAMPLES])
def test_the_source_has_the_fields_that_the_loaded_recipe_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for neighbour in Path(name).parent.glob("*.py"):  # of another folder, in a test before this one
        monkeypatch.delitem(sys.modules, neighbour.stem, raising=False)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / neighbour.name).is_file()])
    loaded = {field.flag for field in fields_of(find(name), by_code=True)}
    by_source = field_names.of_recipe(name)
    listed = set(field_names.flags_of(by_source))
    assert listed <= loaded
    assert [flag for flag in loaded if not field_names.has(by_source, flag)] == []
    assert len(listed) > 0.9 * len(loaded)  # the rest stands in a value that a function makes
    assert not any(field_names.has(by_source, f"{flag}x") for flag in listed)


def test_the_classes_of_a_users_file_are_read_with_what_they_inherit(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OF_A_USER)
    by_source = field_names.of_recipe(str(tmp_path / "mine.py"))
    for flag in ("--task.width", "--task.path", "--task.size.hidden-size", "--steps", "--no-offline", "--task.size"):
        assert field_names.has(by_source, flag)
    for flag in ("--task.digits", "--task.widht", "--task.size.hidden", "--stepz", "--no-stepz", "--steps.most"):
        assert not field_names.has(by_source, flag)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("recipe = replace(quickstart, task=Mine())", "recipe = made()"),
        ("recipe = replace(quickstart, task=Mine())", "recipe = quickstart\nrecipe = replace(recipe, task=Mine())"),
        ("recipe = replace(quickstart, task=Mine())", "recipe = replace(quickstart, **{'task': Mine()})"),
        ("recipe = replace(quickstart, task=Mine())", "for recipe in [quickstart]:\n    pass"),
        ("class Mine(Base)", "class Mine(made)"),
        ("@dataclass(frozen=True)\nclass Mine", "@made\nclass Mine"),
        ("recipe = replace(quickstart, task=Mine())", "recipe = replace(("),
    ],
)
def test_where_the_source_does_not_tell_any_name_may_be_right(tmp_path: Path, before: str, after: str) -> None:
    assert before in OF_A_USER
    (tmp_path / "mine.py").write_text(OF_A_USER.replace(before, after))
    assert field_names.has(field_names.of_recipe(str(tmp_path / "mine.py")), "--task.anything")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "train quickstart --stepz 3 --steps 4 --replay.m=0.5 --no-offlin --config f.toml",
            "tba: tba train quickstart has no field --stepz; did you mean --steps? And no field --replay.m; did you "
            "mean --replay.selection.m? And no field --no-offlin; did you mean --offline? And no field "
            "--optimizer.lrr; did you mean --optimizer.lr?\n",
        ),
        ("eval quickstart --txts x", "tba: tba eval quickstart has no field --txts; did you mean --texts?\n"),
        ("sft a.jsonl --out b --modl x", "tba: tba sft a.jsonl has no field --modl; did you mean --model?\n"),
        (
            "red-team world --out b --exchange 1",
            "tba: tba red-team world has no field --exchange; did you mean --exchanges?\n",
        ),
        (
            "check quickstart --num-generations 4",
            "tba: tba check quickstart has no field --num-generations; did you mean both --samples-per-prompt and "
            "--group-size?\n",
        ),
    ],
)
def test_unknown_fields_are_named_all_at_once_before_anything_heavy_is_loaded(
    tmp_path: Path, words: str, sentence: str
) -> None:
    (tmp_path / "f.toml").write_text("[optimizer]\nlrr = 2\n")
    program = (
        "import sys; from tba.__main__ import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if {'torch', 'transformers', 'datasets'} & sys.modules.keys() else code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.stderr, ended.returncode) == (sentence, 2)
