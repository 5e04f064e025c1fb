"""Answers of an endpoint against a server on loopback: what it is asked, what becomes of its replies, what it costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.endpoint_server import Reply, Server, said, serving

import tiny_sums
from serving import chat_recipe
from serving.chat_llama import chat_llama
from tba.__main__ import main
from tba.engines.endpoint import Budget, EndpointEngine
from tba.errors import TbaError, UserError
from tba.objectives.ppo import Ppo
from tba.recipe import Recipe
from tba.recipes import guess_number
from tba.replay.follower import JournalFollower
from tba.rewards.endpoint import Refused
from tba.rollout.prompts import PromptStream
from tba.runs.endpoint_answers import AnsweringEndpoint, EndpointAnswers
from tba.runtime.prompt_sets import prompt_set_of
from tba.types import Completion, Prompt, Sampling, Trajectory

CHAT_RECIPE, SUMS_RECIPE = Path(chat_recipe.__file__), Path(tiny_sums.__file__)
EXACT = Sampling()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The recipe of chats with a small model."""
    folder = tmp_path_factory.mktemp("chat")
    chat_llama(folder)
    return replace(chat_recipe.recipe, model=replace(chat_recipe.recipe.model, path=str(folder)))


def attached(recipe: Recipe, server: Server, **changes: Any) -> tuple[EndpointEngine, list[Prompt]]:
    """An engine that asks the server, and the prompts of the recipe."""
    endpoint = AnsweringEndpoint(server.url, "teacher", pause=0.01, **changes.pop("endpoint", {}))
    answers = EndpointAnswers(endpoint, **changes)
    answers.check(recipe)
    model = recipe.model.prepared(recipe.task)
    prompts = prompt_set_of(recipe, model, "train").prompts
    engine, _ = answers.attach(model, recipe.prompts.max_tokens, PromptStream(prompts, 0, lambda count: []))
    return engine, prompts


def answers_of(engine: EndpointEngine, prompts: list[Prompt], count: int = 1) -> list[list[Completion]]:
    """The answers to each prompt."""
    flow, answers = engine.flow(count, EXACT, None), [list[Completion]() for _ in prompts]  # type: ignore[arg-type]
    flow.submit(prompts)
    while flow.unfinished_prompts:
        for number, completions in flow.next(until_needed=False):
            answers[number] += completions
    return answers


def imported(path: Path, recipe: Path, rows: list[dict[str, Any]], *settings: str) -> list[Trajectory]:
    """What `tba import` makes of the rows of a file."""
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["import", str(path / "run"), str(file), "--recipe", str(recipe), *settings]) == 0
    with JournalFollower(path / "run" / "journal.sqlite") as journal:
        return list(journal.drain())


def facts(prompt: Prompt, completion: Completion) -> tuple[Any, ...]:
    return prompt.key, completion.tokens.tolist(), completion.text, completion.stop_reason


def test_a_chat_is_asked_and_the_tokens_of_its_answer_are_those_of_an_import(
    server: Server, chats: Recipe, tmp_path: Path
) -> None:
    texts = ["Two.", "  3 ", "It is four, since 3 + 1 = 4.", "π", "<|im_end|> no", "five<|im_end|>"]

    def reply(n: int, question: dict[str, Any]) -> Reply:
        number = int(question["messages"][-1]["content"].split()[2])
        return said([texts[number]], usage=(7, 3), end="length" if number == 1 else "stop")

    server.script = reply
    engine, prompts = attached(chats, server)
    prompts = prompts[: len(texts)]
    answers = answers_of(engine, prompts, 2)
    assert {tuple(sorted(question)) for question in server.asked} == {
        ("max_tokens", "messages", "model", "temperature")
    }
    assert server.paths[0] == "/v1/chat/completions"
    assert [{"role": "user", "content": "What is 0 + 1?"}] in [question["messages"] for question in server.asked]
    rows = [
        {"messages": [*prompt.messages, {"role": "assistant", "content": text}], "finish_reason": end}
        for prompt, text, end in zip(prompts, texts, ["", "length", "", "", "", ""], strict=True)
        if prompt.messages is not None
    ]
    journal = imported(tmp_path, CHAT_RECIPE, rows, "--model.path", chats.model.path)  # type: ignore[attr-defined]
    written = [facts(p, c) for p, row in zip(prompts, answers, strict=True) for c in row[:1] if len(c.tokens)]
    assert written == [facts(t.prompt, t.completion) for t in journal]
    assert len(written) >= 4
    assert all(a.tokens.tolist() == b.tokens.tolist() for a, b in answers)
    assert (engine.spending.calls, engine.spending.tokens) == (12, 120)
    assert sum(engine.spending.rejections.values()) == 2 * (len(texts) - len(written))


def test_a_text_is_completed_and_can_be_asked_as_a_chat_too(server: Server, tmp_path: Path) -> None:
    def reply(n: int, question: dict[str, Any]) -> Reply:
        text = question["prompt"] if "prompt" in question else question["messages"][0]["content"]
        a, b = text.removesuffix("=").split("+")
        return said([str(int(a) + int(b))[::-1]], chat="messages" in question)

    server.script = reply
    by_api = {}
    for api in (None, "chat"):
        engine, prompts = attached(tiny_sums.recipe, server, api=api)
        by_api[api] = [facts(p, c) for p, (c,) in zip(prompts, answers_of(engine, prompts), strict=True)]
    assert by_api[None] == by_api["chat"]
    assert {server.paths[0], server.paths[-1]} == {"/v1/completions", "/v1/chat/completions"}
    rows = [{"prompt": p.text, "response": text} for p, (_, _, text, _) in zip(prompts, by_api[None], strict=True)]
    assert sorted(by_api[None]) == sorted(
        facts(t.prompt, t.completion) for t in imported(tmp_path, SUMS_RECIPE, rows) if t.reward == 1
    )


def test_a_server_that_has_too_much_to_do_or_fails_is_asked_again(server: Server, chats: Recipe) -> None:
    failures: dict[int, Reply] = {0: (429, {"Retry-After": "0"}, b"{}"), 1: (500, {}, b""), 2: (200, {}, b"<html>")}
    server.script = lambda n, question: failures.get(n, said(["Yes."]))
    engine, prompts = attached(chats, server)
    assert [c.text.rpartition("\n")[2] for (c,) in answers_of(engine, prompts[:2])] == ["Yes.", "Yes."]
    assert (len(server.asked), engine.spending.calls) == (5, 2)


def test_one_that_refuses_or_is_down_ends_it_with_a_sentence(server: Server, chats: Recipe) -> None:
    for status, error, words in (
        (401, UserError, "put the token into the environment variable OPENAI_API_KEY"),
        (404, UserError, "check --endpoint and --model"),
        (500, Refused, "did not answer in 3 calls"),
    ):
        server.script = lambda n, question, status=status: (status, {}, b"{}")  # type: ignore[misc]
        engine, prompts = attached(chats, server, endpoint={"retries": 2})
        with pytest.raises(error, match=words):
            answers_of(engine, prompts[:1])


GARBAGE: list[Any] = [
    *({"choices": []}, {"choices": "x"}, {"choices": [7]}, {"choices": [{"message": 7}]}, {}, {"choices": {"0": 1}}),
    *({"choices": [{"message": {"content": value}}]} for value in (None, "", 5, {}, "\ud800", "é" * 10**6)),
    {"choices": [{"message": {"content": "", "tool_calls": [{"function": 3}]}}]},
    {"choices": [{"message": {"content": "a", "tool_calls": "x"}, "finish_reason": {}}]},
    {"choices": [{"message": {"role": "user", "content": "long " * 400}}], "usage": {"prompt_tokens": "7"}},
]


def test_replies_that_hold_no_answer_are_counted_and_are_no_errors(server: Server, chats: Recipe) -> None:
    server.script = lambda n, question: (200, {}, json.dumps(GARBAGE[n]).encode())
    engine, prompts = attached(chats, server)
    for _ in GARBAGE:
        ((completion,),) = answers_of(engine, prompts[:1])
        assert (len(completion.tokens), completion.text) == (0, "")
    assert sum(engine.spending.rejections.values()) == engine.spending.calls == len(GARBAGE)
    assert not any("\ud800" in reason or "é" in reason for reason in engine.spending.rejections)


def test_a_budget_ends_it(server: Server, chats: Recipe) -> None:
    server.script = lambda n, question: said(["Yes."], usage=(10, 2))
    engine, prompts = attached(chats, server, budget=Budget(calls=7))
    assert sum(map(len, answers_of(engine, prompts, 2))) == len(server.asked) == 7
    longest = len(prompts[0].tokens) + chats.model.max_completion_tokens
    engine, prompts = attached(chats, server, budget=Budget(tokens=longest + 2 * 12))
    assert sum(map(len, answers_of(engine, prompts, 2))) == 3  # the fourth might take more than what is left
    assert engine.spending.tokens == 36


def test_runs_that_cannot_learn_from_it_are_refused_before_anything_is_asked(server: Server, chats: Recipe) -> None:
    tools = replace(chats.task.problems("train")[0], tools=({"type": "function"},))
    for recipe, words in (
        (replace(chats, objective=Ppo()), "Ppo, needs the log-probabilities"),
        (replace(chats, task=guess_number.recipe.task), "has an environment or tools"),
        (replace(chats, task=_Problems([tools])), "has an environment or tools"),
    ):
        with pytest.raises(UserError, match=words):
            EndpointAnswers(AnsweringEndpoint(server.url, "m")).check(recipe)
    for settings, words in (
        ({"url": server.url}, "needs --model, the model's name there"),
        ({"url": "http://user:secret@host/v1", "model": "m"}, "has an @ or a"),
        ({"url": "nowhere", "model": "m"}, "the endpoint's url is 'nowhere'"),
    ):
        with pytest.raises(TbaError, match=words):
            EndpointAnswers(AnsweringEndpoint(**settings))
    assert server.asked == []


class _Problems:
    name = "problems"

    def __init__(self, problems: list[Any]) -> None:
        self._problems = problems

    def problems(self, split: str) -> list[Any]:
        return self._problems

    def reward(self) -> Any:
        raise NotImplementedError
