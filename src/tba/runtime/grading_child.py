"""The program whose processes grade by a recipe's reward: `python -m tba.runtime.grading_child SPEC HOW`.

Invariant: the recipe is the one that every part of the run rebuilds, and nothing but the recipe's own modules and what
finds them is loaded: no model, no tokenizer, no data. `runtime/isolated.py` has the rest of its life.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tba.runtime.isolated import serve_grading
from tba.types import Json

if TYPE_CHECKING:
    from tba.protocols import Reward, Task


def load(spec: Json) -> Callable[[], Reward]:
    """Loads the recipe of a spec; returns what makes its reward."""
    sys.path += [place for place in spec["path"] if place not in sys.path]  # of a script, which its parent is
    from tba.runtime.graders import reward_of

    task = _task_of(spec)
    return partial(_examination, task) if spec["split"] == "eval" else partial(reward_of, task)


def _task_of(spec: Json) -> Task:
    if "run" in spec:
        from tba.runtime.run_directory import RunDirectory

        return RunDirectory.open(Path(spec["run"])).recipe().task
    from tba.settings import find, override

    name = spec["recipe"]
    return override(find(name), spec["overrides"], f"tba train {name}", recorded=True).task


def _examination(task: Task) -> Reward:
    from tba.protocols import Examined
    from tba.runtime.graders import reward_of

    return task.examination() if isinstance(task, Examined) else reward_of(task)


if __name__ == "__main__":
    serve_grading(partial(load, json.loads(sys.argv[1])), sys.argv[2])
