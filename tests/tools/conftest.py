"""The scripts of `tools/`, each for the tests of its name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def tool(request: pytest.FixtureRequest) -> ModuleType:
    """`tools/NAME.py` in `test_NAME.py`, as a module."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass of its own looks its module up
    spec.loader.exec_module(module)
    return module
