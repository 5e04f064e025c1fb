"""`docs/recipes.md` says what the recipes say of themselves."""

from types import ModuleType

from tba.recipe_names import recipe_names
from tba.settings import module_of


def test_the_committed_page_is_the_one_the_recipes_give(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/recipes_page.py`"


def test_every_recipe_says_more_of_itself_than_its_name() -> None:
    assert [name for name in recipe_names() if len(module_of(name).__doc__ or "") < 100] == []
