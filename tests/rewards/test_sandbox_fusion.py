"""Programs on a server that answers as SandboxFusion's published schema says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tba.errors import PartFailed, UserError
from tba.rewards.code_reward import CodeReward
from tba.rewards.code_running import Language
from tba.rewards.sandbox import strongest_level
from tba_lab.code_attacks import answered
from tba_lab.fusion_server import fusion_server

ADD = {"test_list": ["assert add(1, 2) == 3", "assert add(20, 3) == 23"]}
ECHO = {"tests": [{"input": "5\n", "output": "5\n"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if strongest_level()[0] is None:
        pytest.skip("this machine isolates no programs, which the server of these tests does")
    with fusion_server() as url_and_requests:
        yield url_and_requests


def test_a_program_is_sent_with_its_inputs_and_never_with_what_is_expected(
    server: tuple[str, list[dict[str, Any]]],
) -> None:
    url, requests = server
    reward = CodeReward(sandbox_fusion=url, seconds=9.0, memory_mb=300)
    assert reward.judge([answered(ADD, "def add(a, b): return a + b")])[0].reward == 1.0
    (request,) = requests
    assert request["path"] == "/run_code"
    assert (request["language"], request["memory_limit_MB"], request["run_timeout"]) == ("python", 300, 30.0)
    assert "[20, 3]" in request["stdin"]
    assert not re.search(r"\b23\b", request["stdin"])  # but maybe within a random number
    assert reward.judge([answered(ECHO, "print(input())")])[0].reward == 1.0
    assert (requests[1]["stdin"], requests[1]["run_timeout"]) == ("5\n", 9.0)


def test_what_a_program_prints_is_no_reply_and_its_end_is_told(server: tuple[str, list[dict[str, Any]]]) -> None:
    patient = CodeReward(sandbox_fusion=server[0], score="share")
    impatient = CodeReward(sandbox_fusion=server[0], score="share", answer_seconds=1.0, seconds=1.0)
    codes = {
        "def add(a, b):\n    print(['0', 'value', 3])\n    return 3": (0.5, 0, 0),
        "import os\nos._exit(0)": (0, 1, 0),
        "def add(a, b):\n    if a > 1: os._exit(0)\n    return 3\nimport os": (0.5, 1, 0),
        "while True: pass": (0, 0, 1),
        "def add(a, b: return": (0, 0, 0),
    }
    for code, expected in codes.items():
        judgement = (impatient if "while" in code else patient).judge([answered(ADD, code)])[0]
        parts = judgement.parts
        assert (judgement.reward, parts["code_failed"], parts["code_timed_out"]) == expected, code
    assert parts["no_code"] == 1.0


def test_a_server_that_fails_or_is_no_sandbox_is_an_error(server: tuple[str, list[dict[str, Any]]]) -> None:
    other = CodeReward(sandbox_fusion=server[0], language=Language("cobol"))
    with pytest.raises(PartFailed, match="SandboxError"):
        other.judge([answered(ECHO, "DISPLAY 5")])
    with pytest.raises(UserError, match="SandboxFusion server's url is 'nonsense'"):
        CodeReward(sandbox_fusion="nonsense").judge([answered(ECHO, "print(5)")])
