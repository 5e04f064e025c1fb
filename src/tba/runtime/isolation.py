"""How a recipe's reward comes to run in processes of its own: what rebuilds the recipe there.

Invariant: nothing is started before an answer is graded in such a process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.errors import UserError
from tba.runtime.isolated import Graders, IsolatedGrader
from tba.runtime.run_directory import RunDirectory
from tba.types import Json, Split


@dataclass(frozen=True)
class RecipeSource:
    """A recipe by its name or path and the overrides, for commands that have no run."""

    recipe: str
    overrides: Sequence[str] = ()


def isolated_reward(
    source: RunDirectory | RecipeSource | None, seconds: float, split: Split = "train", name: str = "the reward"
) -> Callable[[], IsolatedGrader]:
    """Returns what makes graders, one for each thread that grades; their processes have one nursery.

    seconds: that a call may take. split: `eval` takes the reward that evaluates, where that is another one. source
    None: no other process can rebuild the recipe, which is what the first call says, in a `UserError`.
    """
    if source is None:
        return lambda: _refuse_isolation(name)
    graders = Graders(command_of(source, split), name)
    return lambda: graders.grader(seconds)


def command_of(source: RunDirectory | RecipeSource, split: Split) -> list[str]:
    """Returns the command of the processes that grade by the reward of a recipe."""
    spec: Json = {"split": split, "path": sys.path}
    if isinstance(source, RunDirectory):
        spec["run"] = str(source.path.resolve())
    else:
        spec |= {"recipe": source.recipe, "overrides": list(source.overrides)}
    return [sys.executable, "-m", "tba.runtime.grading_child", json.dumps(spec)]


def _refuse_isolation(name: str) -> IsolatedGrader:
    raise UserError(
        f"{name} has to run in a process of its own, since it uses signals or does not end, and no other process can "
        "make this recipe: put what it is made of into a .py file, and give its path"
    )
