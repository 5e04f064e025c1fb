"""What a lesson of a warm start teaches."""

from __future__ import annotations

from tba.models.warm_start import Lesson, pairs_of
from tba.tasks.arithmetic import Arithmetic
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import character_tokenizer


def test_a_lesson_of_prompts_too_learns_every_token_but_the_first() -> None:
    task, tokenizer = Arithmetic(digits=1, train_problems=20, eval_problems=8), character_tokenizer("0123456789+= ")
    plain = list(pairs_of(task.problems("train"), tokenizer))
    assert Lesson(SupervisedSettings()).pairs(task, tokenizer) == plain
    whole = Lesson(SupervisedSettings(), prompts=True).pairs(task, tokenizer)
    assert [[*p.prompt, *p.response] for p in whole] == [[*p.prompt, *p.response] for p in plain]
    assert {len(p.prompt) for p in whole} == {1}
    fewer = Lesson(SupervisedSettings(), {"train_problems": 5}).pairs(task, tokenizer)
    assert len(fewer) == 5
