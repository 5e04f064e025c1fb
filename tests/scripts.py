"""The scripts of `lab/benchmarks/` and `tools/` as modules, for the tests of what they compute."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def script(path: str) -> Any:
    """The module of `path`, such as lab/benchmarks/growth.py, which may import the scripts beside it. Loaded once."""
    file = ROOT / path
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)  # where its dataclasses look themselves up
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
