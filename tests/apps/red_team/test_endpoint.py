"""A victim behind an HTTP endpoint, held against a server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.rewards.endpoint_server import Reply, Server, said, serving

from tba.apps.red_team.endpoint import EndpointVictim
from tba.errors import DeadlineExceeded, TbaError, UserError


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def victim(server: Server, **changes: Any) -> EndpointVictim:
    return EndpointVictim(url=server.url, model="m", **{"pause": 0.0, "retries": 2, "concurrency": 1, **changes})


def test_each_attack_is_one_call_and_answers_come_in_order(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    server.script = lambda n, asked: said([f"to {asked['messages'][-1]['content']}"] * asked["n"])
    started = victim(server, token_variable="MY_TOKEN", concurrency=4, system="be nice").start()
    assert started.answers(["a", "b", "c"], 2) == [["to a"] * 2, ["to b"] * 2, ["to c"] * 2]
    assert set(server.tokens) == {"Bearer s3cret"}
    assert set(server.paths) == {"/v1/chat/completions"}
    assert {(q["model"], q["n"], q["max_tokens"], q["temperature"], q["top_p"]) for q in server.asked} == {
        ("m", 2, 64, 0.7, 0.95)
    }
    assert server.asked[0]["messages"][0] == {"role": "system", "content": "be nice"}
    assert started.answers([], 2) == []


def test_completions_are_asked_by_prompt_and_an_empty_answer_is_an_answer(server: Server) -> None:
    server.script = lambda n, asked: said([asked["prompt"], None], chat=False)
    started = victim(server, api="completions", token_variable="NOT_SET_ANYWHERE").start()
    assert started.answers(["x"], 2) == [["x", ""]]
    assert server.tokens == [None]
    assert server.paths == ["/v1/completions"]


def test_fewer_answers_than_asked_for_are_asked_for_again(server: Server) -> None:
    server.script = lambda n, asked: said([f"{n}"])  # one at a time, whatever n was
    assert victim(server).start().answers(["x"], 3) == [["0", "1", "2"]]
    assert [q["n"] for q in server.asked] == [3, 2, 1]


def test_what_is_refused_for_the_moment_or_breaks_off_is_tried_again_a_bounded_number_of_times(server: Server) -> None:
    replies: list[Reply] = [(429, {"Retry-After": "0"}, b"{}"), (0, {}, b""), said(["at last"])]
    server.script = lambda n, asked: replies[n]
    assert victim(server).start().answers(["x"], 1) == [["at last"]]
    server.script = lambda n, asked: (503, {}, b'{"error": {"message": "do not quote: hush", "code": "overloaded"}}')
    with pytest.raises(TbaError, match=r"did not answer in 3 calls, the last: overloaded") as raised:
        victim(server).start().answers(["a secret attack"], 1)
    assert "hush" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert len(server.asked) == 6


def test_a_reply_that_is_no_json_object_is_asked_for_again_a_bounded_number_of_times(server: Server) -> None:
    _, _, whole = said(["at last"])
    for broken in (b"", b"<html>Bad gateway</html>", whole[:-9], b"[1]", b"\xff"):
        replies, before = [(200, {}, broken), (200, {}, broken), (200, {}, whole)], len(server.asked)
        server.script = lambda n, asked, replies=replies, before=before: replies[n - before]
        assert victim(server).start().answers(["x"], 1) == [["at last"]]
        server.script = lambda n, asked, broken=broken: (200, {}, broken)
        with pytest.raises(
            TbaError, match=r"did not answer in 3 calls, the last: a reply of \d+ bytes that is no JSON"
        ):
            victim(server).start().answers(["x"], 1)
        assert len(server.asked) == before + 6


def test_an_error_s_code_is_printable(server: Server) -> None:
    code = json.dumps({"error": {"code": "\x1b]0;mine\x07\u202e\n" + "x" * 1000}}).encode()
    for status in (400, 503):
        server.script = lambda n, asked, status=status: (status, {}, code)
        with pytest.raises(TbaError, match=r"\\x1b\]0;mine\\x07\\u202e\\nx+\.\.\.") as raised:
            victim(server).start().answers(["x"], 1)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 400


def test_what_will_not_get_better_is_said_at_once(server: Server) -> None:
    for reply, words in (
        ((401, {}, b""), "environment variable OPENAI_API_KEY"),
        ((404, {}, b'{"error": {"type": "not_found"}}'), r"404, not_found\): check --task.victim.url"),
        ((400, {}, b"[]"), r"refuses the call \(400\)"),
        ((200, {}, b'{"html": 1}'), "does not reply as an OpenAI-compatible endpoint"),
        ((200, {}, b'{"choices": [{"message": {"content": 3}}]}'), "no text"),
    ):
        server.script, before = (lambda n, asked, reply=reply: reply), len(server.asked)
        with pytest.raises(UserError, match=words):
            victim(server).start().answers(["x"], 1)
        assert len(server.asked) == before + 1


def test_a_token_stays_with_its_endpoint_and_out_of_errors(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret\r\n")  # from a file with other line ends
    server.script = lambda n, asked: said(["fine"])
    assert victim(server, token_variable="MY_TOKEN").start().answers(["x"], 1) == [["fine"]]
    assert server.tokens == ["Bearer s3cret"]
    monkeypatch.setenv("MY_TOKEN", "s3c\nret")
    with pytest.raises(UserError, match="MY_TOKEN has characters") as raised:
        victim(server, token_variable="MY_TOKEN").start()
    assert "s3c" not in str(raised.value)
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    for status in (301, 302, 303, 307, 308):
        server.script = lambda n, asked, status=status: (status, {"Location": f"{server.url}/elsewhere"}, b"")
        with pytest.raises(UserError, match="it redirects"):
            victim(server, token_variable="MY_TOKEN").start().answers(["x"], 1)
    assert set(server.paths) == {"/v1/chat/completions"}


def test_greedy_answers_are_asked_for_once(server: Server) -> None:
    server.script = lambda n, asked: said(["same"])
    assert victim(server, temperature=0.0).start().answers(["x"], 3) == [["same"] * 3]
    assert [q["n"] for q in server.asked] == [1]


def test_one_call_at_a_time_has_the_deadline_too(server: Server) -> None:
    free = threading.Event()

    def hang(n: int, asked: dict[str, Any]) -> Reply:
        free.wait(10)
        return said(["late"])

    server.script = hang
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for the victim at .*raise --task\.victim\.deadline"):
        victim(server, deadline=0.05).start().answers(["x"], 1)
    free.set()


def test_a_server_that_is_not_there_or_hangs_ends_within_the_deadline(server: Server) -> None:
    free = threading.Event()

    def hang(n: int, asked: dict[str, Any]) -> Reply:
        free.wait(10)
        return said(["late"])

    server.script = hang
    with pytest.raises(TbaError, match="did not answer in 1 calls"):
        victim(server, timeout=0.05, retries=0).start().answers(["x"], 1)
    free.set()
    with pytest.raises(TbaError, match="did not answer in 2 calls"):
        EndpointVictim(url="http://127.0.0.1:9/v1", model="m", pause=0.0, retries=1).start().answers(["x"], 1)
