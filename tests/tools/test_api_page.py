"""`docs/api.md` says what the docstrings of the public names say."""

import inspect
from types import ModuleType

import tba


def test_the_committed_page_is_the_one_the_code_gives(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/api_page.py`"


def test_every_public_name_every_field_and_every_method_of_it_is_explained(tool: ModuleType) -> None:
    lacking = [name for name in tba.__all__ if not inspect.getdoc(getattr(tba, name))]
    lacking += [
        f"{name}.{field}"
        for name in tba.__all__
        if inspect.isclass(kind := getattr(tba, name)) and "__dataclass_fields__" in vars(kind)
        for field, said in tool.meanings(kind).items()
        if not said
    ]
    assert lacking == []
