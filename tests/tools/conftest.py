"""The scripts of `tools/`, each for the tests of its name."""

from types import ModuleType

import pytest
from tests.scripts import script


@pytest.fixture(scope="module")
def tool(request: pytest.FixtureRequest) -> ModuleType:
    """`tools/NAME.py` in `test_NAME.py`, as a module."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    return script(f"tools/{name}.py")
