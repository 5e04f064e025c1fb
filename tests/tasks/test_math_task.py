r"""MATH from local files of our own making: splits, boxed answers, MATH-500, and the sentences of what goes wrong."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tba.errors import UserError
from tba.protocols import Task
from tba.rewards.math_answer import MathAnswer
from tba.tasks.math import INSTRUCTION, Math


def row(n: int, answer: str | None = None, **more: Any) -> dict[str, Any]:
    """A problem about n."""
    boxed = str(2 * n) if answer is None else answer
    given = {} if answer is None else {"answer": answer}
    return {"problem": f"What is $2 \\cdot {n}$?", "solution": f"Twice {n} is $\\boxed{{{boxed}}}$.", **given, **more}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(r) + "\n" for r in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six problems to train on, of which one has no answer and one is also in the test; four to test."""
    write(tmp_path / "train.jsonl.gz", [row(1), row(2, "4"), row(3, level="Level 2"), row(4, ""), row(5), row(10)])
    write(tmp_path / "test.jsonl.gz", [row(n, in_math500=n % 2 == 0) for n in (10, 11, 12, 13)])
    return tmp_path


def questions(task: Math, split: str) -> list[int]:
    return [int(p.fields["question"].split()[-1].rstrip("$?")) for p in task.problems(split)]


def test_problems_without_an_answer_and_those_of_the_test_are_left_out_of_training(folder: Path) -> None:
    task = Math(str(folder))
    assert questions(task, "train") == [1, 2, 3, 5]
    assert questions(task, "eval") == [10, 11, 12, 13]
    assert isinstance(task, Task)


def test_a_problem_is_read_whole(folder: Path) -> None:
    problem = Math(str(folder)).problems("train")[2]
    assert problem.prompt == f"Problem:\nWhat is $2 \\cdot 3$?\n\n{INSTRUCTION}\n\nSolution:\n"
    assert problem.fields == {"question": "What is $2 \\cdot 3$?", "answer": "6", "level": "Level 2"}
    assert problem.demonstration == "Twice 3 is $\\boxed{6}$."


def test_the_chat_style_is_one_message_of_the_user(folder: Path) -> None:
    problem = Math(str(folder), style="chat").problems("train")[0]
    assert problem.prompt == ({"role": "user", "content": f"What is $2 \\cdot 1$?\n\n{INSTRUCTION}"},)


def test_math500_is_its_own_file_or_what_the_test_says_is_in_it(folder: Path) -> None:
    task = Math(str(folder), evaluate_on="math500")
    assert questions(task, "eval") == [10, 12]
    assert questions(task, "train") == [1, 2, 3, 5]
    write(folder / "math500.jsonl", [row(13)])
    assert questions(task, "eval") == [13]


def test_the_rest_of_the_test_may_be_trained_on_with_math500_only(folder: Path) -> None:
    assert questions(Math(str(folder), evaluate_on="math500", train_on_rest=True), "train") == [1, 2, 3, 5, 11, 13]
    assert questions(Math(str(folder), train_on_rest=True), "train") == [1, 2, 3, 5]


def test_a_test_of_500_is_math500_and_any_other_without_a_mark_is_not(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row(1)])
    write(tmp_path / "test.jsonl", [row(n) for n in range(2, 502)])
    task = Math(str(tmp_path), evaluate_on="math500")
    assert len(task.problems("eval")) == 500
    write(tmp_path / "test.jsonl", [row(n) for n in range(2, 501)])
    with pytest.raises(UserError, match=r"math has no MATH-500 in '.*': add math500\.jsonl, or a field 'in_math500'"):
        task.problems("eval")


def test_every_demonstration_earns_the_reward_which_has_the_tasks_settings(folder: Path) -> None:
    task = Math(str(folder), graders=3, grading_seconds=7.0)
    reward = task.reward()
    assert (reward.processes, reward.seconds) == (3, 7.0)
    assert isinstance(reward, MathAnswer)
    pairs = [(p.fields["answer"], p.fields["answer"]) for p in task.problems("train")]
    assert reward.grade(pairs) == [True] * 4


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"problem": "?", "solution": "no box"}, r"line 2 of .*train.jsonl has a field 'solution' without \\boxed"),
        ({"problem": "?"}, r"line 2 of .*train.jsonl has no field 'solution': give it a text"),
        ({"solution": "\\boxed{1}"}, r"line 2 of .*train.jsonl has no field 'problem': give it a text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: dict[str, str], sentence: str) -> None:
    write(tmp_path / "test.jsonl", [row(1)])
    write(tmp_path / "train.jsonl", [row(2), line])
    with pytest.raises(UserError, match=sentence):
        Math(str(tmp_path)).problems("train")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"but there is no test\.jsonl \(or \.jsonl\.gz\) in it: add it"):
        Math(str(tmp_path)).problems("eval")
    (tmp_path / "test.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"test\.jsonl\.gz cannot be read \(Not a gzipped file"):
        Math(str(tmp_path)).problems("eval")
    with pytest.raises(UserError, match=r"math has path '\./gone', which does not exist: give a Hub name"):
        Math("./gone").problems("eval")
    monkeypatch.setitem(sys.modules, "datasets", None)  # what Python does for a package that is not installed
    with pytest.raises(UserError, match="needs `pip install datasets`: install it, or give a folder with train"):
        Math().problems("train")
