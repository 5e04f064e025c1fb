"""Every script of `lab/benchmarks/` still finds what it imports, and says how it is used."""

from __future__ import annotations

import io
import json
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from tests.runtime.runs import ended, forked

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
# which run in an environment with TRL
SCRIPTS = [script for script in sorted(FOLDER.glob("*.py")) if not script.match("trl_*side.py")]


def test_every_benchmark_loads_and_prints_its_usage(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert ended(forked(partial(load_all, results))) == 0
    printed = json.loads(results.read_text())
    assert len(printed) == len(SCRIPTS) > 50
    wrong = [f"{name}: {text}" for name, text in printed.items() if text != f"usage: {name}"]
    assert not wrong, "\n".join(wrong)


def load_all(results: Path) -> None:
    """Write the beginning of what each script prints, by its name."""
    sys.path.insert(0, str(FOLDER))
    results.write_text(json.dumps({script.name: usage(script) for script in SCRIPTS}))


def usage(script: Path) -> str:
    """Returns the first words of the script's help; of a script without arguments, once loaded, the same; else why
    not.
    """
    text, sys.argv = io.StringIO(), [str(script), "--help"]
    has_parser = "ArgumentParser(" in script.read_text()
    try:
        with redirect_stdout(text):
            runpy.run_path(str(script), run_name="__main__" if has_parser else script.stem)
    except SystemExit as end:
        return text.getvalue()[: len(f"usage: {script.name}")] if end.code == 0 else f"exit code {end.code}"
    except Exception:  # noqa: BLE001 - the test says which
        return traceback.format_exc(limit=-1)
    return f"usage: {script.name}" if not has_parser else "it did not end"
