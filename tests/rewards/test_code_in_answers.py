"""Code in answers to our own graders: it is text, and is marked in bounded time."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tba.protocols import Reward
from tba.rewards.exact_answer import ExactAnswer, ExactText
from tba.rewards.functions import FunctionReward
from tba.rewards.math_answer import MathAnswer
from tba.types import Completion, Prompt, StopReason, Version

TOUCHED = {"compile", "exec", "os.system", "os.fork", "os.exec", "os.posix_spawn", "open", "socket.__new__"}
MARKS = [ExactAnswer(), ExactAnswer(strict=True), ExactText()]

heard: list[tuple[str, str]] | None = None


def hear(event: str, arguments: tuple[object, ...]) -> None:
    if heard is not None:
        heard.append((event, repr(arguments)))


sys.addaudithook(hear)  # for the rest of the process; it listens only while `heard` is a list


def codes(file: Path) -> list[str]:
    call = f"__import__('os').system('touch {file}')"
    without_quotes = "+".join(f"chr({ord(c)})" for c in call)
    return [
        call,
        f"[{call}]",
        f"f'{{{call}}}'",
        f"x + {call}",
        f"eval({without_quotes})",
        f"2*x + exec({without_quotes})",
        f"sympify({without_quotes})",
        f"\\input|touch {file}",
        f"\\frac{{{call}}}{{1}}",
        f"\\operatorname{{exec}}({without_quotes})",
        f"open('{file}', 'w')",
        "9**9**9**9",
        "9^{9^{9^{9}}}",
    ]


def answers(file: Path) -> list[str]:
    return [form for code in codes(file) for form in (code, f"\\boxed{{{code}}}", f"so it is\n#### {code}")]


def rewards(reward: Reward, file: Path) -> list[float]:
    tokens = np.array([1], dtype=np.int32)
    prompt = Prompt("a task", tokens, "", {"answer": "0.375", "digits": "2357", "target": 17})
    versions = (Version(), Version())
    return [
        judgement.reward
        for judgement in reward.judge(
            [(prompt, Completion(tokens, text, StopReason.EOS, versions)) for text in answers(file)]
        )
    ]


@pytest.mark.parametrize("reward", MARKS, ids=repr)
def test_a_grader_runs_compiles_and_opens_nothing_of_an_answer(reward: Reward, tmp_path: Path) -> None:
    global heard
    file = tmp_path / "file"
    rewards(reward, file)  # what it compiles of its own
    heard = []
    found = rewards(reward, file)
    said, heard = heard, None
    assert not [event for event in said if event[0] in TOUCHED]
    assert set(found) == {0.0}
    assert not file.exists()


def test_a_function_reward_gives_an_answer_to_its_function_as_text(tmp_path: Path) -> None:
    seen = []

    def of(prompt: str, completion: str) -> float:
        seen.append(completion)
        return 0.0

    file = tmp_path / "file"
    assert set(rewards(FunctionReward(of), file)) == {0.0}
    assert seen == answers(file)
    assert not file.exists()


def test_the_algebra_of_math_answers_runs_nothing_and_ends(tmp_path: Path) -> None:
    file = tmp_path / "file"
    reward = MathAnswer(processes=1, seconds=3.0)
    assert set(rewards(reward, file)) == {0.0}
    assert not file.exists()
    reward.close()
