"""`tba serve` beside `tba train`, each in processes of its own, and agents that speak HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from tests.runtime.runs import Command, command, ended, forked, made, steps_of, until

from serving.chat_llama import chat_llama
from serving.http_agents import SECONDS, acknowledged, ask, play_on
from tba.__main__ import main
from tba.command.options import ServeOptions
from tba.command.search import _require_single_grades
from tba.command.serve import AgentService, _facts_file
from tba.errors import UserError
from tba.protocols import GradingCalls
from tba.record.faults import count_faults
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.settings import find
from tba.types import Completion, Judgement, Prompt, Trajectory

RECIPE = Path(__file__).parents[1] / "serving" / "chat_recipe.py"
FOREIGN = {"messages": [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "41"}], "answer": "41"}
TOKENS = {"alice": "the-token-of-alice", "bob": "the-token-of-bob-"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    chat_llama(folder)
    return folder


@dataclass
class Agents:
    """Agents of one token, each in a process of its own, that play until the block ends."""

    path: Path  # of the run
    name: str
    children: list[int] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.path.with_name(f"{self.name}.jsonl")

    @property
    def acknowledged(self) -> dict[str, float]:
        """The rewards of what they were told is on the disk, by uid."""
        return acknowledged(self.file)

    def __enter__(self) -> Agents:
        self.children = [forked(partial(play_on, self.path, self.name, self.file)) for _ in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            os.kill(child, signal.SIGKILL)
            assert ended(child) == -signal.SIGKILL


@contextmanager
def processes() -> Iterator[Callable[..., Command]]:
    """Starts commands, none of which outlives the block."""
    commands: list[Command] = []

    def start(*arguments: str) -> Command:
        commands.append(command(*arguments))
        return commands[-1]

    try:
        yield start
    finally:
        for process in commands:
            process.kill()
            process.communicate(timeout=SECONDS)


def training(path: Path, model: Path, *arguments: str) -> tuple[str, ...]:
    place = ("--runs", str(path.parent), "--run-name", path.name, "--model.path", str(model))
    return ("train", str(RECIPE), *place, *arguments)


def serving(path: Path, tokens: Path) -> tuple[str, ...]:
    return ("serve", "--run", str(path), "--port", "0", "--tokens", str(tokens))


def rows(path: Path) -> list[Trajectory]:
    with JournalFollower(path / "journal.sqlite") as journal:
        return list(journal.drain())


def require_whole(path: Path, acknowledged: dict[str, float]) -> Summary:
    """The account closes, and all that agents were told is on the disk is there, with its reward."""
    summary = Summary.read(path)
    assert summary is not None
    assert summary.tokens.closes(), summary.tokens
    assert summary.trajectories.closes(), summary.trajectories
    recorded = {row.uid: row.reward for row in rows(path)}
    assert acknowledged.items() <= recorded.items()
    return summary


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    return file


def test_a_run_learns_from_its_agents_alone(tmp_path: Path, model: Path, tokens: Path) -> None:
    path = tmp_path / "run"
    with processes() as start:
        train = start(*training(path, model))
        until(lambda: (path / "logs" / "trainer.log").exists(), SECONDS, "the run to begin")
        serve = start(*serving(path, tokens))
        url = until(lambda: url_of(path), SECONDS, "the server")
        assert (path / "serve.json").stat().st_mode & 0o077 == 0
        _, episode = ask(url, "POST", "/episodes", TOKENS["alice"])
        for method, route in (("POST", f"/episodes/{episode['id']}/end"), ("DELETE", f"/episodes/{episode['id']}")):
            status, refusal = ask(url, method, route, TOKENS["bob"])
            assert (status, refusal["error"]["code"]) == (403, "foreign_episode")
        base_call = {"model": "base", "messages": episode["prompt"], "max_tokens": 5}
        status, answer = ask(url, "POST", "/v1/chat/completions", episode["api_key"], base_call)
        assert (status, answer["model"]) == (200, "base")
        assert ask(url, "DELETE", f"/episodes/{episode['id']}", episode["api_key"])[0] == 204
        told = [*episode["prompt"], {"role": "assistant", "content": "One."}, {"role": "user", "content": "Sure?"}]
        rollout = {"messages": [*told, {"role": "assistant", "content": "Two."}], "uid": "mine", "reward": 9}
        for expected in ({"imported": 1, "repeated": 0}, {"imported": 0, "repeated": 1}):
            status, report = ask(url, "POST", "/rollouts", TOKENS["alice"], [rollout, "no object", FOREIGN])
            assert (status, {name: report[name] for name in expected}) == (200, expected)
            assert [reason["count"] for reason in report["rejected"].values()] == [1, 1]
            assert "a prompt that is none of the task's" in report["rejected"]
        with Agents(path, "alice") as alice, Agents(path, "bob") as bob:
            output, errors = train.communicate(timeout=SECONDS)
            assert (train.returncode, errors) == (0, ""), output
        output, errors = serve.communicate(timeout=SECONDS)
        assert (serve.returncode, errors) == (0, ""), output
        assert "served: " in output
    assert not (path / "serve.json").exists()
    summary = require_whole(path, alice.acknowledged | bob.acknowledged)
    assert summary.served["calls of the base"] == 1
    served_rows = [row for row in rows(path) if not row.imported]
    (rollout_row,) = (row for row in rows(path) if row.imported)
    assert len(rollout_row.completion.turns) == 2
    assert rollout_row.reward == float((rollout_row.completion.tokens % 2 == 0).mean())
    for row in served_rows:
        agent = row.provenance["agent"]
        assert {name: row.provenance[name] for name in ("calls", "claimed_reward", "tag")} == {
            "calls": 2,
            "claimed_reward": 77.5,
            "tag": agent,
        }
        assert row.reward == float((row.completion.tokens % 2 == 0).mean())  # whatever was claimed
        assert row.uid not in (alice if agent == "bob" else bob).acknowledged
    log = "".join(file.read_text() for file in (path / "logs").glob("*.log"))
    assert "Are you sure?" not in log
    assert not any(token in log for token in TOKENS.values())


def url_of(path: Path) -> str | None:
    try:
        return str(json.loads((path / "serve.json").read_text())["url"])
    except FileNotFoundError:
        return None


def test_what_agents_were_told_outlives_a_server_that_is_killed(tmp_path: Path, model: Path, tokens: Path) -> None:
    path = tmp_path / "run"
    with processes() as start:
        train = start(*training(path, model, "--steps", "1000000"))
        until(lambda: (path / "logs" / "trainer.log").exists(), SECONDS, "the run to begin")
        first = start(*serving(path, tokens))
        with Agents(path, "alice") as alice:
            until(lambda: len(alice.acknowledged) >= 3, SECONDS, "episodes")
            first.kill()
            first.communicate(timeout=SECONDS)
            until(lambda: count_faults(path)["joined_deaths"] == 1, SECONDS, "the driver to see that it died")
            count = len(alice.acknowledged)
            second = start(*serving(path, tokens))
            until(lambda: len(alice.acknowledged) >= count + 3 and steps_of(path), SECONDS, "more episodes, and steps")
            train.send_signal(signal.SIGINT)
            output, errors = train.communicate(timeout=SECONDS)
            assert (train.returncode, errors) == (130, ""), output
        _, errors = second.communicate(timeout=SECONDS)
        assert (second.returncode, errors) == (0, "")
    summary = require_whole(path, alice.acknowledged)
    assert [joined["how"] for joined in summary.joined] == ["it died", "the run ended"]


def test_each_server_of_a_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    with _facts_file(tmp_path, "searcher-1") as first:
        first.write_text("first")
        with _facts_file(tmp_path, "searcher-2") as second:
            second.write_text("second")
            assert (first.name, second.name) == ("serve.json", "serve-searcher-2.json")
        assert first.read_text() == "first"
        assert not second.exists()
    with _facts_file(tmp_path, "searcher-3") as third:
        assert third.name == "serve.json"


def test_what_cannot_be_served_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*arguments: str) -> str:
        assert main(["serve", "--run", str(tmp_path / "run"), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    def file(content: str) -> str:
        (tmp_path / "file").write_text(content)
        return str(tmp_path / "file")

    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        assert "give --certificate" in refusal("--host", host)
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert "give --certificate" not in refusal("--host", host)  # but there is no such run
    assert "cannot be used" in refusal("--certificate", str(tmp_path / "none.pem"))
    assert "cannot be used" in refusal("--certificate", file("-----BEGIN CERTIFICATE-----\n"))
    for content, reason in (
        ('{"alice": "short"}', "less than 16 characters"),
        ("{}", "has none"),
        ('["a-long-enough-token"]', "unexpected contents"),
        ('{"alice": 12345678901234567890}', "unexpected contents"),
        ('{"alice": "a-long-enough-token", "bob": "a-long-enough-token"}', "two owners"),
        ('{"alice": "a long enough token"}', "no header can carry"),
        ('{"alice": "a-long-en\u00f6ugh-token"}', "no header can carry"),
        ("{", "unexpected contents"),
    ):
        assert reason in refusal("--tokens", file(content))
    for flag, value in (("--port", "-1"), ("--port", "65536"), ("--max-calls", "0"), ("--idle-seconds", "nan")):
        assert flag in refusal(flag, value)


def test_a_port_that_is_taken_is_said_before_the_run_is_joined() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match="give a port that is free"):
            AgentService(ServeOptions(port=port))


def test_a_run_that_is_not_in_progress_is_not_served(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = made(tmp_path / "run", "--model.path", str(model), source=RECIPE)
    assert main(["serve", "--run", str(run.path), "--port", "0"]) == 2
    assert "is not in progress" in capsys.readouterr().err


@dataclass(frozen=True)
class GroupReward:
    """Compares the answers of a group."""

    def calls(self) -> list[GradingCalls]:
        return [GradingCalls("comparison", lambda rows: [0.0 for _ in rows], "group")]

    def judgement(self, values: Sequence[float]) -> Judgement:
        return Judgement(values[0])

    def judge(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement(0.0) for _ in answers]


def test_a_reward_that_compares_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = find(str(RECIPE))
    _require_single_grades(recipe)
    monkeypatch.setattr(type(recipe.task), "reward", lambda task: GroupReward())
    with pytest.raises(UserError, match="compares the answers of a group"):
        _require_single_grades(recipe)
