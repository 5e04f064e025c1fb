"""`docs/settings.md` says what the dataclasses say."""

import dataclasses
from types import ModuleType

import pytest

from tba.fields import fields_of
from tba.settings import find
from tba.shipped import names


def test_the_committed_page_is_the_one_the_code_gives(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/settings_page.py`"


@pytest.mark.parametrize("recipe", names())
def test_every_flag_of_every_recipe_is_on_the_page(tool: ModuleType, recipe: str) -> None:
    page = tool.page()
    flags = [f.flag for f in fields_of(find(recipe))]
    for field, listed in tool.SAME.items():
        flags = [flag.replace(f"{field}.", f"{listed}.") for flag in flags]
    assert [flag for flag in flags if f"| `{flag}` |" not in page] == []


def test_a_setting_is_on_the_page_once(tool: ModuleType) -> None:
    """Classes that fill the same slot may have fields of one name; each of these is explained where its class is."""
    common, _, _ = tool.page().partition("## What a recipe is made of")
    flags = [line.split("`")[1] for line in common.splitlines() if line.startswith("| `--")]
    assert len(flags) == len(set(flags)) > 80


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
