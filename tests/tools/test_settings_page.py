"""`docs/settings.md` says what the dataclasses say."""

import dataclasses
from types import ModuleType

import pytest

from tba.fields import fields_of
from tba.settings import find, names


def test_the_committed_page_is_the_one_the_code_gives(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/settings_page.py`"


@pytest.mark.parametrize("recipe", names())
def test_every_flag_of_every_recipe_is_on_the_page(tool: ModuleType, recipe: str) -> None:
    page = tool.page()
    assert [f.flag for f in fields_of(find(recipe)) if f"| `{f.flag}` |" not in page] == []


def test_a_meaning_is_the_comment_behind_a_field_and_those_below_it(tool: ModuleType) -> None:
    @dataclasses.dataclass(frozen=True)
    class Kettle:
        """Boils."""

        litres: float = 1.5  # of water
        whistle: bool = True  # when it boils; off: it is silent,
        # which is for the night

        colour: str = "#ffffff"

    assert tool.comments(Kettle) == {
        "litres": "of water",
        "whistle": "when it boils; off: it is silent, which is for the night",
        "colour": "",
    }


def test_a_slot_is_filled_by_what_can_do_its_work(tool: ModuleType) -> None:
    found = {slot.flag: [kind.__name__ for kind in tool.fillings(slot)] for slot in tool.SLOTS}
    assert {"TrajectoryBalance", "Reinforce", "Grpo", "Ppo", "VinePpo"} <= set(found["--objective"])
    assert found["--objective.correction"] == ["Correction"]
    assert found["--exploration"] == ["Fixed", "RandomPerRound"]
    assert {"Arithmetic", "Gsm8k", "Jsonl", "ReasoningGym"} <= set(found["--task"])
