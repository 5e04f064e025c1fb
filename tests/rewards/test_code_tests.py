"""Tests as data sets have them, and the code in an answer."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from tba.errors import UserError
from tba.rewards.code_tests import FunctionCall, InputOutput, Statement, extract_code, read_tests

STDIN = {"inputs": ["1 2\n", "3\n"], "outputs": ["3\n", "3\n"]}
TWO = [InputOutput("1 2\n", "3\n"), InputOutput("3\n", "3\n")]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_output": json.dumps(STDIN)},  # APPS, TACO
        {"input_output": STDIN},
        {"reward_model": {"ground_truth": json.dumps(STDIN), "style": "rule"}},  # verl
        {"verification_info": json.dumps({"ground_truth": STDIN})},
        {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "3\n", "output": "3\n"}]},
        {"answer": json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "3\n", "output": "3\n"}])},
        {  # CodeContests
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": ["3\n"], "output": ["3\n"]},
            "generated_tests": {"input": [], "output": []},
        },
        {  # LiveCodeBench
            "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
            "private_test_cases": base64.b64encode(
                zlib.compress(pickle.dumps(json.dumps([{"input": "3\n", "output": "3\n", "testtype": "stdin"}])))
            ).decode(),
            "metadata": "{}",
        },
    ],
)
def test_pairs_of_input_and_output_are_read_wherever_they_are(fields: dict[str, Any]) -> None:
    assert list(read_tests(fields).tests) == TWO


def test_functions_with_calls_are_read_and_their_values_compared_as_json_has_them() -> None:
    apps = read_tests({"input_output": {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}}).tests[0]
    assert isinstance(apps, FunctionCall)
    assert (apps.function, apps.arguments, apps.as_json) == ("f", (1, [2]), True)
    assert len(apps.expected_texts) == 2  # 3 or [3]: the data sets have both
    case = {"input": '[1, 2]\n"x"', "output": "[0]", "testtype": "functional"}
    bench = read_tests({"public_test_cases": json.dumps([case]), "metadata": json.dumps({"func_name": "g"})}).tests[0]
    assert bench == FunctionCall("g", ([1, 2], "x"), [0], as_json=True)
    plain = read_tests({"tests": [{"function": "f", "arguments": [1], "expected": 2, "weight": 3}]}).tests[0]
    assert plain == FunctionCall("f", (1,), 2, as_json=True, weight=3.0)


def test_asserts_that_compare_a_call_with_a_literal_are_calls() -> None:
    tests = read_tests({"test_list": ["assert f((1, 2), k={3: [4]}) == {5}", "assert f(-1) == None"]}).tests
    assert list(tests) == [FunctionCall("f", ((1, 2),), {5}, {"k": {3: [4]}}), FunctionCall("f", (-1,), None)]


@pytest.mark.parametrize(
    "other",
    ["assert f(math) == 1", "assert f(1)", "assert set(f(1)) == {1}", "assert f(1) == f(2)", "x = 1\nassert f(1) == 1"],
)
def test_other_asserts_are_statements_and_so_are_all_beside_them(other: str) -> None:
    tests = read_tests({"test_list": ["assert f(1) == 1", other], "test_imports": ["import math"]})
    assert list(tests.tests) == [Statement("assert f(1) == 1"), Statement(other)]
    assert tests.setup == "import math"


def test_the_programs_names_in_statements_are_neither_builtins_nor_modules() -> None:
    source = "assert math.isclose(abs(area(Pair(1, 2))), 2) and sum([1]) == 1"
    names, modules = read_tests({"test_list": [source]}).names
    assert (names, modules) == (["Pair", "area"], ["math"])


def test_a_check_of_plain_asserts_is_calls_and_any_other_is_run() -> None:
    plain = "METADATA = {'a': 1}\n\ndef check(candidate):\n    assert candidate(1) == 2, 'no'\n    assert True\n"
    tests = read_tests({"test": plain, "entry_point": "f", "prompt": "def f(x):\n"})
    assert (list(tests.tests), tests.entry_point) == ([FunctionCall("f", (1,), 2)], "f")
    loop = "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x\n"
    tests = read_tests({"test": loop, "entry_point": "f"})
    assert (list(tests.tests), tests.setup) == ([Statement("check(f)")], loop)
    assert tests.names[0] == ["f"]


def test_what_a_prompt_defines_beside_its_entry_point_is_the_tests_own() -> None:
    prompt = "import math\n\ndef half(x):\n    return x / 2\n\ndef f(x):\n    # twice\n"
    fields = {"test": "def check(g):\n    for x in (1, 2):\n        assert half(g(x)) == x\n", "entry_point": "f"}
    tests = read_tests(fields, prompt=prompt)
    names: dict[str, Any] = {"f": lambda x: 2 * x}
    exec(f"{tests.setup}\ncheck(f)", names)
    assert (names["half"](4), tests.names) == (2, (["f"], []))
    with pytest.raises(UserError, match=r"they use half, which neither they nor the prompt define"):
        read_tests(fields, prompt="def f(x):\n")
    assert read_tests({**fields, "program_names": ["half"]}).names[0] == ["f", "half"]


@pytest.mark.parametrize(
    ("source", "setup", "names"),
    [
        ("assert isclose(f(1), 2.5)", "", "f, isclose"),
        ("assert isclose(Circle(1).area(), 3.14)", "", "Circle, isclose"),
        ("check(f)", "def check(f):\n    assert isclose(f(1), 2.5)", "f, isclose"),
        ("assert np.allclose(f(1), 2.5)", "", "f, np"),
    ],
)
def test_a_test_takes_one_function_from_the_program_unless_more_are_listed(source: str, setup: str, names: str) -> None:
    fields = {"test_list": [source], "test_setup_code": setup}
    with pytest.raises(UserError, match=f"takes {names} from the program"):
        read_tests(fields)
    listed = read_tests({**fields, "program_names": json.dumps(names.split(", "))})
    assert listed.names[0] == names.split(", ")
    imports = ["from math import isclose", "import numpy as np"]
    assert len(read_tests({**fields, "test_imports": imports}).names[0]) == 1
    assert read_tests({**fields, "test_imports": ["from math import *"]}).tests  # may have bound them


def test_classes_of_the_program_may_make_arguments() -> None:
    pairs = read_tests({"test_list": ["assert chain([Pair(1, 2)], 4) == 3"]})
    assert pairs.names[0] == ["Pair", "chain"]
    tree = read_tests(
        {"test_list": ["assert height(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"}
    )
    assert tree.names[0] == ["Node", "height"]


def test_a_named_field_is_read_and_what_is_not_there_is_said() -> None:
    assert list(read_tests({"extra": {"mine": json.dumps(STDIN)}}, "extra.mine").tests) == TWO
    with pytest.raises(UserError, match=r"has no tests in its field 'mine': it has the fields answer, tests"):
        read_tests({"tests": STDIN, "answer": 1}, "mine")
    with pytest.raises(UserError, match=r"has no tests in a field that is known"):
        read_tests({"answer": "42"})
    with pytest.raises(UserError, match=r"cannot be read .*inputs and outputs are not lists of one length"):
        read_tests({"input_output": {"inputs": ["1"], "outputs": []}})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tests": [{"function": "f", "arguments": [1], "result": 2}]},
            "a test of f has the fields arguments, function, result: give `expected`",
        ),
        ({"tests": [{"function": "f", "arguments": nested(61), "expected": 2}]}, "of f .* too deeply nested"),
        ({"tests": [{"function": "f", "arguments": [], "expected": nested(61)}]}, "of f .* too deeply nested"),
        ({"test_list": [f"assert f({nested(61)}) == 1"]}, "of f .* too deeply nested"),
        ({"test_list": ["assert f(...) == 1"]}, "a ellipsis is no data"),
    ],
)
def test_calls_that_could_not_be_made_or_compared_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_tests(fields)


def test_a_call_may_be_expected_to_return_nothing_and_to_take_deep_values() -> None:
    row = {"function": "f", "arguments": nested(55), "expected": None}
    (test,) = read_tests({"tests": [row]}).tests
    assert isinstance(test, FunctionCall)
    assert test.expected_texts == {"null"}


class Bomb:
    """Is noticed when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


def test_a_pickled_column_is_read_and_not_unpickled() -> None:
    column = base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()
    with pytest.raises(UserError, match="cannot be read"):
        read_tests({"public_test_cases": [], "private_test_cases": column})


@pytest.mark.parametrize(
    ("text", "code", "is_fenced"),
    [
        ("def f(): pass", "def f(): pass", False),
        ("First\n```\nx = 1\n```\nthen\n```python\ny = 2\n```\ndone", "y = 2\n", True),
        ("```python\nx = 1\n", "x = 1\n\n", True),  # cut off
        ("  ```py\n    x = 1\n  ```", "    x = 1\n", True),
        ("```\n```", "\n", True),
        ("", "", False),
    ],
)
def test_the_code_is_the_last_block_or_the_whole_text(text: str, code: str, is_fenced: bool) -> None:
    assert extract_code(text) == (code, is_fenced)
