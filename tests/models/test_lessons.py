"""What a lesson of a warm start teaches, and what a task begins with that replaces a recipe's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import tba
from tba.errors import UserError
from tba.models.warm_start import Lesson, WarmStart, demonstration_pairs
from tba.recipes.quickstart import BASE
from tba.recipes.quickstart import recipe as QUICKSTART
from tba.tasks.arithmetic import Arithmetic
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import character_tokenizer


def test_a_lesson_of_prompts_too_learns_every_token_but_the_first() -> None:
    task, tokenizer = Arithmetic(digits=1, train_problems=20, eval_problems=8), character_tokenizer("0123456789+= ")
    plain = list(demonstration_pairs(task.problems("train"), tokenizer))
    assert Lesson(SupervisedSettings()).pairs(task, tokenizer) == plain
    whole = Lesson(SupervisedSettings(), prompts=True).pairs(task, tokenizer)
    assert [[*p.prompt, *p.response] for p in whole] == [[*p.prompt, *p.response] for p in plain]
    assert {len(p.prompt) for p in whole} == {1}
    fewer = Lesson(SupervisedSettings(), {"train_problems": 5}).pairs(task, tokenizer)
    assert len(fewer) == 5


@dataclass(frozen=True)
class Doubling:
    """A user's own task in a recipe that came with another; `worked`: its problems have demonstrations."""

    worked: bool = False
    name: str = "doubling"

    def problems(self, split: str) -> list[tba.Problem]:
        answers = {n: str(2 * n)[::-1] for n in range(100, 120)}
        return [tba.Problem(f"{n}+{n}=", {"answer": a}, a if self.worked else None) for n, a in answers.items()]

    def reward(self) -> tba.ExactAnswer:
        return tba.ExactAnswer()


def test_a_task_without_demonstrations_begins_with_the_base_that_the_recipe_ships() -> None:
    lines: list[str] = []
    recipe = replace(QUICKSTART, task=Doubling())
    assert recipe.model.prepared(recipe.task, lines.append).path == str(BASE)
    assert [line.partition(":")[0] for line in lines] == ["task doubling has no demonstrations to make a base from"]


def test_a_task_with_demonstrations_has_a_base_made_of_them_by_the_lessons_that_are_for_it() -> None:
    few = SupervisedSettings(steps=2, batch_size=4)
    start = WarmStart(
        scratch=tba.ScratchModel(hidden_size=8, layers=1, heads=2, ff_size=8, max_positions=32),
        tokenizer="characters",
        before=(Lesson(few, {"forgotten_carries": 0.0}), Lesson(few, {"name": "twice"})),
        sft=few,
        shipped=BASE,
    )
    assert [lesson.is_for(Doubling()) for lesson in start.before] == [False, True]
    path = tba.HuggingFace(warm_start=start).prepared(Doubling(worked=True)).path
    assert path != str(BASE)
    assert tba.HuggingFace(path).tokenizer()("100+100=")["input_ids"]


def test_without_demonstrations_and_a_base_the_error_says_what_to_give() -> None:
    with pytest.raises(UserError, match=r"^task doubling has no demonstrations to make a base from: give --model.path"):
        tba.HuggingFace(warm_start=WarmStart()).prepared(Doubling())
    tokenizer = tba.HuggingFace(str(BASE)).tokenizer()
    with pytest.raises(UserError, match=r"doubling has no demonstrations to learn: give its problems a worked answer"):
        Lesson(SupervisedSettings()).pairs(Doubling(), tokenizer)
