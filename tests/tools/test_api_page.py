"""`docs/api.md` says what the docstrings of the public names say."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tba

SCRIPT = Path(__file__).parents[2] / "tools" / "api_page.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
