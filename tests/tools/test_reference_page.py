"""`docs/reference.md` says what the dataclasses and the docstrings of the public names say."""

import dataclasses
import inspect
import typing
from types import ModuleType

import tba
from tba.fields import fields_of
from tba.recipe_names import recipe_names
from tba.settings import find


def test_the_committed_page_is_the_one_the_code_gives(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/reference_page.py`"


def test_every_flag_of_every_recipe_is_on_the_page(tool: ModuleType) -> None:
    page = tool.page()
    for recipe in recipe_names():
        flags = [f.flag for f in fields_of(find(recipe))]
        for field, listed in tool.SAME.items():
            flags = [flag.replace(f"{field}.", f"{listed}.") for flag in flags]
        assert [flag for flag in flags if f"\n{flag} " not in page] == [], recipe


def test_a_setting_is_on_the_page_once(tool: ModuleType) -> None:
    """Classes that fill the same slot may have fields of one name; each of these is explained where its class is."""
    common, _, _ = tool.page().partition("## What a recipe is made of")
    flags = [line.split()[0] for line in common.splitlines() if line.startswith("--")]
    assert len(flags) == len(set(flags)) > 80


def test_every_public_name_and_every_field_and_method_of_it_is_explained(tool: ModuleType) -> None:
    page = tool.page()
    for name in tba.__all__:
        kind = getattr(tba, name)
        assert f"`tba.{name}" in page or f"`{name}`" in page
        assert inspect.getdoc(kind), name
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            said, hints = tool.comments(kind), typing.get_type_hints(kind)
            assert [
                f.name for f in dataclasses.fields(kind) if not said[f.name] and not of_ours(hints[f.name])
            ] == [], name


def of_ours(hint: object) -> bool:
    """Whether a type says of itself what a field of it is."""
    return any(inspect.isclass(k) and k.__module__.startswith("tba.") for k in (hint, *typing.get_args(hint)))


def test_a_long_meaning_is_cut_where_it_adds_and_keeps_what_the_default_means(tool: ModuleType) -> None:
    @dataclasses.dataclass(frozen=True)
    class Kettle:
        """Boils."""

        litres: float | None = None

    said = "of water that it takes when it is full (and not a drop more); 0: none; None: a litre; 2: two"
    (field,) = dataclasses.fields(Kettle)
    assert tool.meaning(said, field) == "of water that it takes when it is full; None: a litre"
    assert tool.meaning("a pot, or a can", field) == "a pot, or a can"


def test_a_meaning_is_the_comment_behind_a_field_and_those_below_it(tool: ModuleType) -> None:
    @dataclasses.dataclass(frozen=True)
    class Kettle:
        """Boils."""

        litres: float = 1.5  # of water
        whistle: bool = True  # when it boils; off: it is silent,
        # which is for the night

        colour: str = "#ffffff"
        sign: str = ""  # what stands before the number: # or No.

    assert tool.comments(Kettle) == {
        "litres": "of water",
        "whistle": "when it boils; off: it is silent, which is for the night",
        "colour": "",
        "sign": "what stands before the number: # or No.",
    }


def test_a_slot_is_filled_by_what_can_do_its_work(tool: ModuleType) -> None:
    found = {slot.flag: [kind.__name__ for kind in tool.fillings(slot)] for slot in tool.SLOTS}
    assert {"TrajectoryBalance", "Reinforce", "Grpo", "Ppo", "VinePpo"} <= set(found["--objective"])
    assert found["--objective.correction"] == ["Correction"]
    assert found["--exploration"] == ["Fixed", "RandomPerRound"]
    assert {"Arithmetic", "Gsm8k", "Jsonl", "ReasoningGym"} <= set(found["--task"])
