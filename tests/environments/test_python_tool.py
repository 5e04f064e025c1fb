"""A session of Python in an environment: names stay, what is wrong is said, and it ends with its episode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import tba
from tba.environments.hosts import Beginning, EpisodeLimits, EpisodeReply, Hosts, Question
from tba.environments.task import EnvironmentTask
from tba.environments.tools import find_tools, schemas_of
from tba.errors import UserError
from tba.recipes.quickstart import recipe as quickstart
from tba.rewards.sandbox import strongest_level
from tba.runs.validating import notes_on_prompts


class Arithmetic(tba.PythonTool):
    """An environment with the tool and nothing else."""

    python_seconds = 20.0
    python_characters = 40

    def reset(self, seed: int) -> str:
        return "What is 6 * 7?"

    def get_reward(self, answer: str | None) -> float:
        return float(answer == "42")


@pytest.fixture
def session() -> Iterator[Arithmetic]:
    if strongest_level()[0] is None:
        pytest.skip("this machine isolates no programs")
    environment = Arithmetic()
    yield environment
    environment.close()


def test_the_tool_is_described_and_is_the_only_one() -> None:
    assert list(find_tools(Arithmetic())) == ["python"]
    (schema,) = schemas_of(Arithmetic())
    assert schema["function"]["parameters"]["required"] == ["code"]


def test_names_stay_between_calls_and_the_last_value_is_shown(session: Arithmetic) -> None:
    assert session.python("x = 6\nprint('six')\nx * 7") == "six\n42\n"
    assert session.python("def f(): return x\nf()") == "6\n"
    assert session.python("None") == ""


def test_what_is_wrong_is_said_and_ends_nothing(session: Arithmetic) -> None:
    assert session.python("x = 1\n1 / 0") == "ZeroDivisionError: division by zero\n"
    assert session.python("y = (").startswith("SyntaxError: ")
    assert session.python("open('/etc/passwd')").startswith(("FileNotFoundError", "PermissionError"))
    assert session.python("raise SystemExit(3)") == "SystemExit: 3\n"
    assert session.python("x") == "1\n"
    assert session.python("print('a' * 99)") == "a" * 40 + "... (cut)"


def test_what_cannot_be_encoded_is_shown_as_python_writes_it(session: Arithmetic) -> None:
    assert session.python("print('\\ud800')") == "\\ud800\n"
    assert session.python("raise ValueError('\\ud800')") == "ValueError: \\ud800\n"
    assert session.python("print('\ud800')").startswith("UnicodeEncodeError: ")


def test_a_session_that_is_ended_says_so_and_the_next_call_begins_another(session: Arithmetic) -> None:
    session.python("x = 1")
    assert session.python("import os; os._exit(0)") == "Error: it ended the interpreter; all names are gone"
    assert session.python("x").startswith("NameError")
    session.python_seconds = 0.2  # type: ignore[misc]
    assert "more than 0.2 seconds" in session.python("while True: pass")


def test_a_session_ends_with_its_episode(session: Arithmetic) -> None:
    session.python("x = 1")
    session.close()
    assert session.python("x").startswith("NameError")


def test_an_episode_in_a_process_of_its_own_calls_the_tool(session: Arithmetic) -> None:
    hosts = Hosts(EnvironmentTask(Arithmetic, turns=4), EpisodeLimits(1, seconds=60.0))
    call = '<tool_call>{"name": "python", "arguments": {"code": "x = 6\\nx * 7"}}</tool_call>'
    try:
        hosts.ask(0, Question(Beginning({}, 0, "What is 6 * 7?"), call))
        (reply,) = answers(hosts)
        assert reply.observation is not None
        assert "42" in str(reply.observation)
        hosts.ask(0, Question(None, "42"))
        (reply,) = answers(hosts)
        assert reply.judgement is not None
        assert reply.judgement.reward == 1.0
    finally:
        hosts.close()


def answers(hosts: Hosts) -> list[EpisodeReply]:
    """The next replies."""
    while not (replies := hosts.replies(wait=True)):
        pass
    return list(replies.values())


def test_a_run_says_its_level_and_refuses_to_run_below_it(session: Arithmetic, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(quickstart, task=EnvironmentTask(Arithmetic))
    assert [note for note in notes_on_prompts(recipe) if "the tool python runs code at the level" in note]
    monkeypatch.setattr("tba.rewards.sandbox.strongest_level", lambda *_: (None, "it is a test"))
    with pytest.raises(UserError, match=r"isolates programs not at all \(it is a test\)"):
        notes_on_prompts(recipe)
