"""The example in `examples/my_task.py`, read as a user's file would be."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.protocols import Task
from tba.tasks.arithmetic import Arithmetic
from tba.types import Completion, Prompt, StopReason, Version

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_task.py"


@pytest.fixture(scope="module")
def task() -> Any:
    return runpy.run_path(str(EXAMPLE))["Doubling"]()


def test_the_example_is_a_task_whose_splits_share_nothing(task: Any) -> None:
    assert isinstance(task, Task)
    train, held = task.problems("train"), task.problems("eval")
    assert (len(train), len(held)) == (810, 90)
    assert not {p.prompt for p in train} & {p.prompt for p in held}


def test_the_example_needs_no_character_the_quickstarts_base_does_not_know(task: Any) -> None:
    assert {c for p in task.problems("train") for c in p.prompt + p.fields["answer"]} <= set(Arithmetic().alphabet)


def test_the_example_gives_1_to_a_right_answer_and_part_of_it_to_right_digits(task: Any) -> None:
    prompt = Prompt("doubling", np.array([1], dtype=np.int32), "345+345=", {"answer": "096"})
    texts = ["096", "095", "0961", "", "690"]
    answered = [
        (prompt, Completion(np.array([1], dtype=np.int32), t, StopReason.EOS, (Version(), Version()))) for t in texts
    ]
    assert [j.reward for j in task.reward().judge(answered)] == pytest.approx([1.0, 1 / 3, 3 / 8, 0.0, 1 / 6])


def test_the_example_stays_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
