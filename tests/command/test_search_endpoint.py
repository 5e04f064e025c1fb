"""`tba search --endpoint` beside a run's own searcher, each in processes of its own, and a server that answers both."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.endpoint_server import Reply, said
from tests.rewards.endpoint_server import serving as endpoint_serving
from tests.runtime.runs import Command, command, until

from serving import chat_recipe
from serving.chat_llama import chat_llama
from tba.__main__ import main
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.types import LEFT_OUT, Trajectory

SECONDS = 240.0  # that a busy machine may take for what takes a few
CALLS = 15


def rows_of(path: Path) -> list[Trajectory]:
    with JournalFollower(path / "journal.sqlite") as journal:
        return list(journal.drain())


def test_an_endpoint_answers_beside_a_searcher_until_its_budget_is_spent_and_all_is_accounted_for(
    tmp_path: Path,
) -> None:
    path, model = tmp_path / "run", tmp_path / "model"
    chat_llama(model)

    def reply(n: int, question: dict[str, Any]) -> Reply:
        if n in (1, 2):
            return 429 if n == 1 else 500, {"Retry-After": "0"}, b"{}"
        return said([""] if n % 5 == 3 else [f"The number {n}."], usage=(9, 4))

    words = ("train", chat_recipe.__file__, "--runs", str(tmp_path), "--run-name", "run", "--model.path", str(model))
    with endpoint_serving() as server:
        server.script = reply
        search = ("search", "--run", str(path), "--endpoint", server.url, "--model", "teacher")
        driver = command(*words, "--searchers", "1", "--steps", "1000000")
        commands: list[Command] = []
        try:
            until(lambda: (path / "journal.sqlite").exists() and rows_of(path), SECONDS, "the run's own answers")
            commands.append(command(*search, "--budget-calls", str(CALLS), "--key-env", "NO_SUCH_KEY"))
            output, errors = commands[0].communicate(timeout=SECONDS)
            assert (commands[0].returncode, errors) == (0, ""), output
            output = " ".join(output.split())
            assert f"answers come from the endpoint at {server.url}" in output
            assert f"spent: {CALLS} calls, {13 * CALLS} tokens; 3 rejected: " in output
            assert "its budget is spent" in output
            asked = len(server.asked)
            assert asked == CALLS + 2  # two were repeated
            assert set(server.tokens) == {None}
            commands.append(command(*search))
            until(lambda: sum(row.imported for row in rows_of(path)) > 2 * CALLS, SECONDS, "more of its answers")
            driver.send_signal(signal.SIGINT)
            output, errors = driver.communicate(timeout=SECONDS)
            assert (driver.returncode, errors) == (130, ""), output
            output, errors = commands[1].communicate(timeout=SECONDS)
            assert (commands[1].returncode, errors) == (0, ""), output
        finally:
            for process in (driver, *commands):
                process.kill()
                process.communicate(timeout=SECONDS)
    summary = Summary.read(path)
    assert summary is not None
    assert summary.tokens.closes(), summary.tokens
    assert summary.trajectories.closes(), summary.trajectories
    assert [joined["how"] for joined in summary.joined] == ["its budget is spent", "the run ended"]
    rows = rows_of(path)
    assert Counter(row.imported for row in rows).keys() == {False, True}
    assert sum(row.provenance["searcher"] == "searcher-1000" for row in rows) == CALLS - 3
    by_prompt: dict[str, list[Trajectory]] = defaultdict(list)
    for row in rows:
        assert row.imported == (row.provenance["searcher"] != "searcher-0")
        assert (row.completion.log_behavior is None) == row.imported
        assert row.reward == float((row.completion.tokens % 2 == 0).mean())
        if row.provenance["searcher"] == "searcher-1000":
            by_prompt[row.prompt.key].append(row)
    marked = [group for group in by_prompt.values() if any(LEFT_OUT in row.provenance for row in group)]
    assert marked
    assert all(len(group) == 1 and group[0].provenance[LEFT_OUT] == 1 for group in marked)
    log = (path / "logs" / "searcher-1000.log").read_text()
    assert f"spent: {CALLS} calls" in log
    assert "The number" not in log


def test_what_cannot_be_asked_is_said_before_the_run_is_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert main(["search", "--run", str(tmp_path / "run"), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    url = "http://127.0.0.1:9/v1"
    assert "give --endpoint URL too" in refusal("--model", "m")
    assert "--budget-calls is of an endpoint" in refusal("--budget-calls", "3")
    assert "needs --model, the model's name there" in refusal("--endpoint", url)
    assert "--budget-tokens is 0: give 1 or more" in refusal("--endpoint", url, "--model", "m", "--budget-tokens", "0")
    assert "has an @ or a ?" in refusal("--endpoint", "http://me:secret@host/v1", "--model", "m")
    assert "temperature" in refusal("--endpoint", url, "--model", "m", "--temperature", "-1")
    assert "run" in refusal("--endpoint", url, "--model", "m")  # there is no such run
