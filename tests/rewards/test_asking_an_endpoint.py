"""An endpoint that a reward function asks, held against a server on loopback."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.rewards.endpoint_server import Reply, Server, said, serving

import tba
from tba.apps.red_team.endpoint import EndpointVictim
from tba.errors import TbaError, UserError
from tba.fields import comments
from tba.rewards.endpoint import CallRate, Refused, Usage
from tba.rewards.threads import run_in_threads


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def test_a_message_is_asked_once_at_temperature_0_however_many_ask_at_once(server: Server) -> None:
    arrived = threading.Barrier(3, timeout=10)  # three different messages are under way together

    def reply(n: int, asked: dict[str, Any]) -> Reply:
        arrived.wait()
        return said([f"of {asked['messages'][-1]['content']}"])

    server.script = reply
    ask = tba.Endpoint(url=server.url, model="m").start()
    messages = ["a", "b", "c", "a", "b", "c"]
    found = run_in_threads([functools.partial(ask, m) for m in messages], 6, 30.0, lambda i: messages[i])
    assert found == [f"of {m}" for m in messages]
    assert sorted(q["messages"][-1]["content"] for q in server.asked) == ["a", "b", "c"]
    assert {(q["n"], q["temperature"]) for q in server.asked} == {(1, 0.0)}


def test_a_sampled_reply_is_asked_for_each_time(server: Server) -> None:
    server.script = lambda n, asked: said([f"{n}"])
    ask = tba.Endpoint(url=server.url, model="m", temperature=1.0).start()
    assert [ask("a"), ask("a")] == ["0", "1"]


def test_what_failed_is_not_remembered_and_a_reply_without_choices_is_told(server: Server) -> None:
    replies = [(503, {}, b"{}"), said([]), said(["7"])]
    server.script = lambda n, asked: replies[n]
    ask = tba.Endpoint(url=server.url, model="m", retries=0).start()
    with pytest.raises(TbaError, match="lower its calls-per-second, or raise its retries"):
        ask("a")
    with pytest.raises(TbaError, match=r"the endpoint at http.* gave 0 of 1 answers"):
        ask("a")
    assert [ask("a"), ask("a")] == ["7", "7"]
    assert len(server.asked) == 3


def test_a_judge_without_an_address_is_told_what_it_needs() -> None:
    with pytest.raises(UserError, match=r"the endpoint needs its url, such as http://127.0.0.1:8000/v1$"):
        tba.Endpoint(model="m").start()
    with pytest.raises(UserError, match=r"needs its url, such as http.*/v1, and its model, the model's name there$"):
        tba.Endpoint().start()
    with pytest.raises(UserError, match="the endpoint's calls_per_second is 0, it must be above 0"):
        tba.Endpoint(calls_per_second=0)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:s3cret@host/v1",
        "http://s3cret@127.0.0.1:8000/v1",
        "user:s3cret@host/v1",
        "https://user:s3cret@host:port/v1",
        "https://host/v1?key=s3cret",
    ],
)
@pytest.mark.parametrize("kind", [tba.Endpoint, EndpointVictim])
def test_a_url_with_a_password_is_refused_and_not_repeated(kind: type[tba.Endpoint], url: str) -> None:
    """So that it is in no error, recipe, report or card."""
    with pytest.raises(UserError, match=r"url has an @ or a \?.*: give the url without, and a token .* ABC") as error:
        kind(url=url, model="m", token_variable="ABC")
    assert "s3cret" not in str(error.value)
    assert kind(url="https://host/v1/@place", model="m").url == "https://host/v1/@place"


def test_inherited_settings_are_explained_by_the_class_they_come_from() -> None:
    own, inherited = comments(EndpointVictim), comments(tba.Endpoint)
    assert own["retries"] == inherited["retries"] != ""
    assert own["concurrency"]
    assert comments(tba.RankingJudge)["rubric"] == comments(tba.RubricJudge)["rubric"] != ""  # one has no field itself


def test_a_rate_gives_turns_at_equal_distances_and_none_is_saved_up() -> None:
    now = [100.0]
    rate = CallRate(2.0, lambda: now[0])
    assert [rate.turn() for _ in range(3)] == [0.0, 0.5, 1.0]
    now[0] = 200.0
    assert [rate.turn() for _ in range(2)] == [0.0, 0.5]
    assert [CallRate(None).turn() for _ in range(3)] == [0.0] * 3


def test_what_calls_cost_is_counted_once_and_who_gets_a_remembered_reply_pays_nothing(server: Server) -> None:
    replies = [said(["7"], usage=(100, 3)), said(["8"]), said(["9"], usage=(-1, 3))]
    server.script = lambda n, body: replies[n]
    ask = tba.Endpoint(url=server.url, model="m").start()
    bill = [ask.reply(message) for message in "aab"]
    assert [(r.text, r.usage.tokens, r.usage.calls, r.usage.uncounted_calls) for r in bill] == [
        ("7", 103, 1, 0),
        ("7", 0, 0, 0),
        ("8", 0, 1, 1),
    ]
    ask("c")
    assert ask.usage == Usage(calls=3, prompt_tokens=100, completion_tokens=3, uncounted_calls=2)


def test_those_who_wait_for_an_equal_message_get_its_failure_too_and_the_next_one_is_sent_again(server: Server) -> None:
    waiting = threading.Event()

    def reply(n: int, body: dict[str, Any]) -> Reply:
        assert waiting.wait(10)
        return said(["7"]) if n else (503, {}, b"{}")

    server.script = reply
    ask = tba.Endpoint(url=server.url, model="m", retries=0).start()
    errors: list[Exception] = []

    def call() -> None:
        try:
            ask("a")
        except TbaError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    (promised,) = _eventually(lambda: list(ask._reply_cache.values()))
    _eventually(lambda: promised._condition._waiters and len(promised._condition._waiters) == 3)
    waiting.set()
    for thread in threads:
        thread.join(10)
    assert (len(errors), len(server.asked)) == (4, 1)
    assert [ask("a"), ask("a"), len(server.asked)] == ["7", "7", 2]


def _eventually(look: Any) -> Any:
    for _ in range(10_000):
        if seen := look():
            return seen
        threading.Event().wait(0.001)
    raise AssertionError


def test_the_reply_that_was_not_used_for_longest_is_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.rewards.endpoint._CACHED_REPLIES", 2)
    server.script = lambda n, body: said([f"{n}"])
    ask = tba.Endpoint(url=server.url, model="m").start()
    assert [ask(message) for message in "abacaba"] == ["0", "1", "0", "2", "0", "3", "0"]


def test_a_refused_call_waits_as_long_as_the_server_says_and_halves_the_calls_at_once(server: Server) -> None:
    replies = [(429, {"Retry-After": "0"}, b"{}"), (500, {}, b"{}"), said(["7"])]
    server.script = lambda n, body: replies[n]
    ask = tba.Endpoint(url=server.url, model="m", pause=0.0).start()
    assert ask("a") == "7"
    assert (ask._gate.limit.calls, ask._gate.limit.halvings, ask._gate.active_calls) == (8, 1, 0)


def test_a_call_that_times_out_halves_the_calls_at_once(server: Server) -> None:
    ended = threading.Event()

    def reply(n: int, body: dict[str, Any]) -> Reply:
        assert ended.wait(10)
        return said(["7"])

    server.script = reply
    ask = tba.Endpoint(url=server.url, model="m", timeout=0.05, retries=0).start()
    with pytest.raises(Refused, match="TimeoutError"):
        ask("a")
    ended.set()
    assert ask._gate.limit.calls == 8
