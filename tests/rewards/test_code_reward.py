"""A reward by running code: right programs earn it, wrong ones and attacks do not, in each form of tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.test_sandbox import has_level

import tba
from tba.errors import UserError
from tba.rewards.code_reward import CodeReward, same_output
from tba.rewards.code_running import Language, LocalRunner, ProgramLimits
from tba.rewards.sandbox import LEVELS, Sandbox, strongest_level
from tba_lab.code_attacks import Attack, answered, attacks, fields_of, lures, program
from tba_lab.fusion_server import fusion_server

MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'"]}
MBPP_OBJECTS = {
    "test_list": ["assert area(Square(3)) == 9", "assert set(sides(Square(2))) == {2}", "assert Square(4).side == 4"],
}
HUMAN_EVAL = {
    "prompt": "import math\n\n\ndef root(x: float) -> float:\n    '''The square root.'''\n",
    "test": "def check(candidate):\n    for x in range(5):\n        assert abs(candidate(x * x) - x) < 1e-6\n",
    "entry_point": "root",
}
STDIN = {"input_output": json.dumps({"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3\n", "7\n"]})}
CALLS = {"input_output": {"fn_name": "pair", "inputs": [[1, [2]], [0, []]], "outputs": [[[1, 2]], [[0]]]}}
SQUARE = "class Square:\n    def __init__(self, side): self.side = side\n"
FORMS: dict[str, tuple[Mapping[str, Any], str, list[str]]] = {  # fields, the gold, and wrong variants
    "mbpp": (
        MBPP,
        "def add(a, b): return a + b",
        ["def add(a, b): return a", "def add(a, b): return 3", "def add(a, b): return (a + b,)"],
    ),
    "mbpp with objects": (
        MBPP_OBJECTS,
        f"{SQUARE}def area(s): return s.side ** 2\ndef sides(s): return [s.side] * 4",
        [
            f"{SQUARE}def area(s): return s.side\ndef sides(s): return [s.side] * 4",
            f"{SQUARE}def area(s): return s.side ** 2\ndef sides(s): return [s]",
            f"{SQUARE}def area(s): return s.side ** 2",
        ],
    ),
    "humaneval": (
        HUMAN_EVAL,
        "    return math.sqrt(x)",
        ["    return x", "    return None", "    return -math.sqrt(x)"],
    ),
    "humaneval, all of it": (
        HUMAN_EVAL,
        "def root(x):\n    return x ** 0.5",
        ["def root(x):\n    return x", "def rooot(x):\n    return x ** 0.5", "def root():\n    return 1"],
    ),
    "stdin": (
        STDIN,
        "a, b = map(int, input().split())\nprint(a + b)",
        ["a, b = map(int, input().split())\nprint(a - b)", "print(3)", "print(int(input()))"],
    ),
    "calls": (
        CALLS,
        "class Solution:\n    def pair(self, a, b): return (a, *b)",
        [
            "def pair(a, b): return [a]",
            "def pair(a, b): return b",
            "class Solution:\n    def pair(self, a, b): return 'no'",
        ],
    ),
}


def at_level(reward: CodeReward, level: Any) -> CodeReward:
    """The reward at a level, where a stronger one may be there too."""
    limits = ProgramLimits(reward.seconds, reward.answer_seconds, reward.memory_mb << 20, reward.language)
    reward.__dict__["_runner"] = LocalRunner(Sandbox(level), limits)
    return reward


@pytest.fixture(scope="module", params=[*LEVELS, "fusion"])
def reward(request: pytest.FixtureRequest) -> Iterator[CodeReward]:
    if not has_level("landlock" if request.param == "fusion" else request.param):
        pytest.skip(f"this machine has no level {request.param}")
    reward = CodeReward(seconds=20.0, processes=1)
    if request.param != "fusion":
        yield at_level(reward, request.param)
    else:
        with fusion_server() as (url, _):
            yield replace(reward, sandbox_fusion=url)


def judge(reward: CodeReward, fields: Mapping[str, Any], text: str) -> tba.Judgement:
    return reward.judge([answered(fields, text)])[0]


def fenced(code: str) -> str:
    return f"This is it:\n```python\n{code}\n```\n"


@pytest.mark.parametrize("form", FORMS)
def test_golds_earn_their_reward_and_wrong_variants_none(reward: CodeReward, form: str) -> None:
    fields, gold, wrong = FORMS[form]
    if reward.sandbox_fusion and form in ("mbpp with objects", "humaneval", "humaneval, all of it"):
        with pytest.raises(UserError, match="SandboxFusion runs a program once"):
            judge(reward, fields, fenced(gold))
        return
    assert judge(reward, fields, fenced(gold)).reward == 1.0
    assert judge(reward, fields, gold).reward == 1.0  # without a block the whole text is the code
    assert [judge(reward, fields, fenced(code)).reward for code in wrong] == [0.0, 0.0, 0.0]


SLOW_ATTACKS = ("patched judge", "read on from the channel", "an integer of 3 million digits", "a value of 50 MB")
FAST_ATTACKS = [a for a in attacks() if a.kind in ("escape", "claim", "honest") and a.name not in SLOW_ATTACKS]


@pytest.mark.parametrize("form", ["calls", "statements", "stdin"])
def test_no_attack_earns_more_than_it_is_worth(reward: CodeReward, form: str, tmp_path: Path) -> None:
    if reward.sandbox_fusion and form == "statements":
        return
    chosen = [a for a in FAST_ATTACKS if form == "calls" or a.kind != "escape"]
    with lures(tmp_path) as lure_places:
        earned = {a.name: judge(reward, fields_of(a, form), program(a, form, lure_places)).reward for a in chosen}
        assert Path(lure_places["PATH"]).exists()
    assert earned == {a.name: a.score for a in chosen}
    assert len(chosen) > 30


def test_a_program_cannot_redefine_what_its_prompt_defines_for_the_tests() -> None:
    fields = {
        "prompt": "def poly(xs, x):\n    return xs[0] + xs[1] * x\n\n\ndef find_zero(xs):\n    '''A zero.'''\n",
        "test": "def check(f):\n    for a in (1, 2):\n        assert abs(poly([a, 2], f([a, 2]))) < 1e-4\n",
        "entry_point": "find_zero",
    }
    reward = require(CodeReward())
    assert judge(reward, fields, "    return -xs[0] / xs[1]").reward == 1.0
    cheat = "def poly(xs, x): return 0\ndef find_zero(xs): return 0"
    assert judge(reward, fields, fenced(cheat)).reward == 0.0


def test_an_exception_that_would_end_a_tests_loop_does_not() -> None:
    fields = {"test": "def check(f):\n    assert all(map(lambda x: f(x) == x, range(3)))\n", "entry_point": "f"}
    reward = require(CodeReward())
    assert judge(reward, fields, fenced("def f(x): return x")).reward == 1.0
    assert judge(reward, fields, fenced("def f(x): raise StopIteration")).reward == 0.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it does not close the file
def test_an_attack_that_is_let_out_earns_its_reward(tmp_path: Path) -> None:
    """The lures are real: outside of a sandbox the first attack reads them."""
    names: dict[str, Any] = {}
    attack: Attack = attacks()[0]
    with lures(tmp_path) as lure_places:
        exec(program(attack, "calls", lure_places).split("```")[1].removeprefix("python"), names)
    assert names["secret"](7) == 120377


def test_the_parts_say_how_tests_ended() -> None:
    patient, impatient = require(CodeReward(score="share")), require(CodeReward(score="share", seconds=2.0))
    cases = {
        fenced("def add(a, b): return 3"): (1 / 3, 1 / 3, 0, 0, 0),
        "I do not know.": (0, 0, 1, 0, 0),
        "": (0, 0, 1, 0, 0),
        fenced("def add(a, b): return ("): (0, 0, 0, 1, 0),
        fenced("def add(a, b): return 3 if a == 1 else 1 / 0"): (1 / 3, 1 / 3, 0, 1, 0),
        fenced("def add(a, b):\n    while a != 1: pass\n    return 3"): (1 / 3, 1 / 3, 0, 0, 1),
    }
    for text, expected in cases.items():
        judgement = judge(impatient if "while" in text else patient, MBPP, text)
        assert (judgement.reward, *judgement.parts.values()) == pytest.approx(expected), text
    assert list(judgement.parts) == ["tests_passed", "no_code", "code_failed", "code_timed_out"]


def test_weights_and_a_checker_decide_what_a_test_is_worth() -> None:
    tests = [{"function": "f", "arguments": [x], "expected": x, "weight": w} for x, w in ((1, 1), (2, 2), (3, 5))]
    code = fenced("def f(x): return x if x != 2 else 2.5")
    assert judge(require(CodeReward(score="weights")), {"tests": tests}, code).reward == pytest.approx(6 / 8)
    seen = []

    def near(output: Any, expected: Any, arguments: Any) -> bool:
        seen.append((output, expected, arguments))
        return abs(output - expected) < 1

    assert judge(require(CodeReward(checker=near)), {"tests": tests}, code).reward == 1.0
    assert seen[1] == (2.5, 2, (2,))


LOOP = "def check(f):\n    for x in (1, 2):\n        assert f(x) == x\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test": f"import numpy as np\n{LOOP}", "entry_point": "f"}, r'numpy.*imports=\("numpy",\)'),
        ({"test_list": ["assert set(f(1)) == {1}"], "test_imports": ["import numpy"]}, r'imports=\("numpy",\)'),
        ({"test": f"{LOOP}\n1 / 0\n", "entry_point": "f"}, r"ZeroDivisionError: division by zero.*: correct it"),
    ],
)
def test_a_setup_that_fails_is_not_the_programs_fault(fields: Mapping[str, Any], message: str) -> None:
    reward = require(CodeReward())
    with pytest.raises(UserError, match=message):
        judge(reward, fields, fenced("def f(x): return x"))
    with pytest.raises(UserError, match=message):
        reward.isolation([tba.Problem("x", MBPP), tba.Problem("x", fields)])


def test_an_import_inside_a_check_that_fails_is_not_the_programs_fault() -> None:
    fields = {"test": LOOP.replace("    for", "    import numpy\n    for"), "entry_point": "f"}
    with pytest.raises(UserError, match=r"numpy.*imports"):
        judge(require(CodeReward()), fields, fenced("def f(x): return x"))


@pytest.mark.parametrize("code", ["def height(x): return 1", "def Node(x): raise ImportError", "def Node(x): return 1"])
def test_a_setup_that_a_program_fails_is_its_fault(code: str) -> None:
    setup = "root = Node(1)\nroot.left = Node(2)"
    fields = {"test_list": ["assert height(root) == 2"], "test_setup_code": setup}
    reward = require(CodeReward())
    right = "class Node:\n    def __init__(self, x): self.x = x\ndef height(root): return 1 + hasattr(root, 'left')"
    assert judge(reward, fields, fenced(right)).reward == 1.0
    assert judge(reward, fields, fenced(code)).reward == 0.0
    assert reward.isolation([tba.Problem("x", fields)]).startswith("programs run")


def test_all_tests_are_needed_whatever_they_weigh() -> None:
    tests = [{"function": "f", "arguments": [x], "expected": x, "weight": w} for x, w in ((1, 1), (2, 0))]
    code = fenced("def f(x): return 1")
    assert judge(require(CodeReward(score="all")), {"tests": tests}, code).reward == 0.0
    assert judge(require(CodeReward(score="weights")), {"tests": tests}, code).reward == 1.0


def test_verdicts_are_remembered_but_for_those_that_ran_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    run = CodeReward._run
    monkeypatch.setattr(CodeReward, "_run", lambda self, code, *rest: runs.append(code) or run(self, code, *rest))
    patient, impatient = require(CodeReward(processes=1)), require(CodeReward(seconds=0.3, processes=1))
    for _ in range(2):
        judge(patient, MBPP, fenced("def add(a, b): return a + b"))
        judge(impatient, MBPP, fenced("def add(a, b):\n    while True: pass"))
    assert [code.count("while") for code in runs] == [0, 1, 1, 1, 1]  # a timeout is run again, each time


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_a_program_is_compiled_in_the_sandbox() -> None:
    if strongest_level(runs_commands=True)[0] != "namespaces":
        pytest.skip("this machine has no namespaces")
    cpp = Language("cpp", "main.cpp", (("g++", "-O0", "-o", "main", "main.cpp"), ("./main",)))
    reward = CodeReward(language=cpp, seconds=60.0, answer_seconds=120.0, memory_mb=1024)
    code = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }"
    assert judge(reward, STDIN, fenced(code)).reward == 1.0


def test_other_languages_are_run_by_their_commands() -> None:
    if strongest_level(runs_commands=True)[0] != "namespaces":
        pytest.skip("this machine has no namespaces")
    shell = Language("bash", "main.sh", (("/bin/sh", "-n", "main.sh"), ("/bin/sh", "main.sh")))
    reward = CodeReward(language=shell)
    adds = "read a b\necho $((a + b)) > sum\ncat sum"
    assert judge(reward, STDIN, fenced(adds)).reward == 1.0
    assert judge(reward, STDIN, fenced(adds.replace("+", "-"))).reward == 0.0
    assert judge(reward, STDIN, fenced("(((")).parts["code_failed"] == 1.0
    with pytest.raises(UserError, match="can only be tested by what they read and write"):
        judge(reward, MBPP, fenced(adds))
    with pytest.raises(UserError, match="only one of file and commands"):
        Language("cpp", "main.cpp")


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("3\n", "3", True),
        ("1 2  \n3\n\n", "1 2\n3", True),
        ("1.50 x", "1.5 x", True),
        ("1\n2", "1 2", False),
        ("nan", "nan", True),
        ("NaN", "nan", False),
        ("", "0", False),
        ("1e400000000 1", "2e400000000 1", False),
        ("1e2 -0.50", "100 -.5", False),
        ("1e2 -0.50", "100 -0.5", True),
        *((word, number, False) for word, number in [("00101", "101"), ("007", "7"), ("1_000", "1000"), ("٣", "3")]),
        *((text, "1 2", False) for text in (" 1 2", "1  2", "1\t2", "1\u30002")),
        ("  *\n ***  ", "  *\n ***", True),
        ("*\n***", "  *\n ***", False),
    ],
)
def test_outputs_are_the_same_up_to_blanks_at_ends_and_how_a_number_is_written(
    output: str, expected: str, is_same: bool
) -> None:
    assert same_output(output, expected) == is_same


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UserError, match="has seconds 0"):
        CodeReward(seconds=0)
    with pytest.raises(UserError, match="has no tests"):
        require(CodeReward()).isolation([tba.Problem("x", {"answer": "4"})])
    assert "at the level" in require(CodeReward()).isolation([tba.Problem("x", MBPP)])
    assert CodeReward(sandbox_fusion="http://127.0.0.1:1").isolation([]).startswith("programs run on the SandboxFusion")


def test_a_file_of_problems_is_judged_by_their_tests(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"Add {k}.", "tests": [{"input": "1\n", "output": f"{1 + k}\n"}]} for k in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tba.Jsonl(path, marked_by=require(CodeReward()))
    problem = task.problems("train")[0]
    code = f"print(int(input()) + {str(problem.prompt)[4:-1]})"
    assert judge(task.reward(), problem.fields, fenced(code)).reward == 1.0  # type: ignore[arg-type]
    assert task.reward().isolation(task.problems("train")).startswith("programs run")  # type: ignore[attr-defined]


def require(reward: CodeReward) -> CodeReward:
    """The reward, on machines that isolate programs."""
    if strongest_level()[0] is None:
        pytest.skip("this machine isolates no programs")
    return reward
