"""A task's reward, and the grader that calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType

from tba.errors import UserError
from tba.grading import RETRIES, Grader
from tba.protocols import AnswerScorer, Examined, Reward, ScoredByCalls, Task
from tba.recipe import Recipe
from tba.runtime.isolation import RecipeSource, isolated_reward
from tba.runtime.run_directory import RunDirectory
from tba.types import Split
from tba.user_code import user_code_error


def reward_of(task: Task) -> Reward:
    """Returns a task's reward. Raises `UserError` when it is none, such as the plain function itself."""
    try:
        reward: object = task.reward()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise user_code_error(f"reward() of task {task.name}", error) from error
    if isinstance(reward, type) or not isinstance(reward, Reward):
        description = f"the function {reward.__name__!r}" if isinstance(reward, FunctionType) else f"{reward!r:.80}"
        raise UserError(
            f"reward() of task {task.name} gave {description}, which has no judge(): for a plain function return "
            "tba.FunctionReward(function)"
        )
    return reward


def grader_of(
    recipe: Recipe,
    source: RunDirectory | RecipeSource | None,
    split: Split = "train",
    *,
    retries: int = RETRIES,
    share: tuple[int, int] = (0, 1),
    report: Callable[[str], None] = lambda message: None,
    teachers: Sequence[AnswerScorer] = (),
) -> Grader:
    """Returns the grader that all commands and runs use for a task's reward.

    source: what rebuilds the recipe in another process, should the reward have to run there. split: `eval` takes the
    reward that evaluates, where the task has another one for that. teachers: those that are servers score the answers
    beside it. The rest is as `Grader` has it.
    """
    task, deadline = recipe.task, recipe.run.reward_deadline
    reward = task.examination() if split == "eval" and isinstance(task, Examined) else reward_of(task)
    isolate = isolated_reward(source, deadline, split, f"the reward of task {task.name}")
    scorers = [teacher.scoring for teacher in teachers if isinstance(teacher, ScoredByCalls)]
    return Grader(reward, deadline, retries, share, report, isolate, scorers=scorers)
