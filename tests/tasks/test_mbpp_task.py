"""MBPP from a folder: what the prompt shows, what is graded, what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba.errors import UserError
from tba.rewards.code_tests import FunctionCall, Statement, read_tests
from tba.tasks.mbpp import Mbpp

ADD = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n  return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(4, 5) == 9"],
    "test_setup_code": "",
}
AREA = {
    "prompt": "Write a function to find the area of a circle.",
    "code": "import math\ndef area(r): return math.pi * r * r",
    "test_list": ["assert math.isclose(area(1), 3.1416, rel_tol=1e-3)"],
    "test_imports": ["import math"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("train", [ADD, AREA]), ("test", [{**AREA}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_prompt_shows_one_assert_and_all_are_graded(folder: Path) -> None:
    (problem,) = Mbpp(str(folder)).problems("train")  # the other one is held out
    (message,) = problem.prompt
    assert isinstance(message, dict)
    assert message["content"].count("assert") == 1
    assert message["content"].startswith(ADD["text"])
    assert list(read_tests(problem.fields).tests) == [FunctionCall("add", (1, 2), 3), FunctionCall("add", (4, 5), 9)]
    assert problem.demonstration == "```python\ndef add(a, b):\r\n  return a + b\n```"
    assert Mbpp(str(folder)).left_out() == {"in the evaluation data too": 1}


def test_imports_of_tests_are_theirs(folder: Path) -> None:
    (problem,) = Mbpp(str(folder)).problems("eval")
    tests = read_tests(problem.fields)
    assert (tests.setup, list(tests.tests)) == ("import math", [Statement(AREA["test_list"][0])])


def test_rows_without_asserts_and_prompts_without_any_are_refused(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**ADD, "test_list": []}) + "\n")
    with pytest.raises(UserError, match=r"line 1 of .*test.jsonl has \[\] as its 'test_list'"):
        Mbpp(str(tmp_path)).problems("eval")
    with pytest.raises(UserError, match="shown_tests 0"):
        Mbpp(shown_tests=0)
