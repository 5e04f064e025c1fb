"""A flow of prompts that an endpoint answers: how many calls at once, what a budget lets begin, how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.engines.endpoint import Budget, EndpointAnswer, EndpointEngine, EndpointFlow
from tba.errors import DeadlineExceeded, UserError
from tba.protocols import AnsweredOneByOne
from tba.tables import Refusal, Values
from tba.types import ELSEWHERE, Completion, Prompt, Sampling, StopReason, Version

PROMPTS = [Prompt("task", np.arange(1, 2 + i, dtype=np.int32), f"{i}") for i in range(5)]
LONGEST = 4  # tokens of an answer


def write(row: Values) -> Completion | Refusal:
    if row["text"] == "garbage":
        return Refusal("an answer that the tokenizer cannot write", "its text")
    tokens = np.array([ord(letter) for letter in row["text"]], np.int32)
    return Completion(tokens, row["text"], StopReason.EXTERNAL, (ELSEWHERE, ELSEWHERE))


def engine_of(ask: Callable[[Prompt], EndpointAnswer], concurrency: int = 3, **changes: Any) -> EndpointEngine:
    return EndpointEngine("the endpoint at URL", ask, write, LONGEST, lambda: concurrency, **changes)


def echo(prompt: Prompt) -> EndpointAnswer:
    return EndpointAnswer({"text": prompt.text}, len(prompt.tokens) + 1)


def flow_of(engine: EndpointEngine, count: int) -> EndpointFlow:
    return engine.flow(count, Sampling(), np.random.default_rng(0))


def answer_all(engine: EndpointEngine, count: int) -> dict[int, list[Completion]]:
    """The answers to all prompts, each of which is submitted as soon as one is needed."""
    flow, prompts, answers = flow_of(engine, count), list(PROMPTS), dict[int, list[Completion]]()
    while prompts or flow.unfinished_prompts:
        needed, prompts = prompts[: flow.prompts_needed], prompts[flow.prompts_needed :]
        flow.submit(needed)
        if engine.is_budget_spent:
            prompts = []
        for number, completions in flow.next(until_needed=bool(prompts)):
            answers.setdefault(number, []).extend(completions)
    return answers


def test_each_prompt_gets_its_answers_and_no_more_calls_are_under_way_than_the_endpoint_takes() -> None:
    under_way, most, lock, together = set[int](), [0], threading.Lock(), threading.Barrier(3, timeout=30)

    def ask(prompt: Prompt) -> EndpointAnswer:
        with lock:
            under_way.add(threading.get_ident())
            most[0] = max(most[0], len(under_way))
        together.wait()  # three calls are under way together, five times
        with lock:
            under_way.discard(threading.get_ident())
        return echo(prompt)

    engine = engine_of(ask)
    answers = answer_all(engine, 3)
    assert {i: [c.text for c in row] for i, row in answers.items()} == {i: [str(i)] * 3 for i in range(5)}
    assert most == [3]
    assert (engine.spending.calls, engine.spending.tokens) == (15, 3 * sum(len(p.tokens) + 1 for p in PROMPTS))
    assert isinstance(flow_of(engine, 1), AnsweredOneByOne)


def test_completions_have_no_log_probabilities_no_sampling_and_no_weights_of_the_run() -> None:
    flow = flow_of(engine_of(echo), 1)
    flow.submit(PROMPTS[:1])
    ((_, (completion,)),) = flow.next(until_needed=False)
    assert (completion.log_behavior, completion.sampling, completion.mask) == (None, None, None)
    assert completion.versions == (ELSEWHERE, ELSEWHERE)


def test_an_answer_that_cannot_be_written_has_no_tokens_and_is_counted() -> None:
    def ask(prompt: Prompt) -> EndpointAnswer:
        rows: dict[str, Values | Refusal] = {"1": {"text": "garbage"}, "2": Refusal("a reply without an answer")}
        return EndpointAnswer(rows.get(prompt.text, {"text": prompt.text}), 2)

    engine = engine_of(ask)
    assert {i: len(row[0].tokens) for i, row in answer_all(engine, 1).items()} == {0: 1, 1: 0, 2: 0, 3: 1, 4: 1}
    assert str(engine.spending).startswith("5 calls, 10 tokens; 1 rejected: ")
    assert engine.spending.rejections == {
        "an answer that the tokenizer cannot write": 1,
        "a reply without an answer": 1,
    }


@given(budget=st.integers(1, 60), count=st.integers(1, 3), concurrency=st.integers(1, 4), shares=st.data())
@settings(max_examples=30, deadline=None)
def test_a_budget_of_tokens_is_never_exceeded_and_ends_when_the_longest_answer_has_no_room(
    budget: int, count: int, concurrency: int, shares: st.DataObject
) -> None:
    answer_lengths = shares.draw(st.lists(st.integers(0, LONGEST), min_size=15, max_size=15))
    lengths = iter(answer_lengths)
    lock = threading.Lock()

    def ask(prompt: Prompt) -> EndpointAnswer:
        with lock:
            return EndpointAnswer({"text": prompt.text}, len(prompt.tokens) + next(lengths))

    engine = engine_of(ask, concurrency, budget=Budget(tokens=budget))
    answers = answer_all(engine, count)
    assert engine.spending.tokens <= budget
    assert sum(map(len, answers.values())) == engine.spending.calls
    if engine.is_budget_spent:
        assert engine.spending.tokens + len(PROMPTS[-1].tokens) + LONGEST > budget
        assert flow_of(engine, count).prompts_needed == 0
    else:
        assert engine.spending.calls == count * len(PROMPTS)


@pytest.mark.parametrize("calls", [1, 4, 14, 15, 100])
def test_a_budget_of_calls_is_used_up_and_prompts_end_with_the_answers_they_have(calls: int) -> None:
    engine = engine_of(echo, budget=Budget(calls=calls))
    answers = answer_all(engine, 3)
    assert sum(map(len, answers.values())) == engine.spending.calls == min(calls, 15)
    assert engine.is_budget_spent == (calls < 15)


def test_who_does_not_count_tokens_cannot_hold_a_budget_of_them() -> None:
    def ask(prompt: Prompt) -> EndpointAnswer:
        return EndpointAnswer({"text": "a"}, None)

    with pytest.raises(UserError, match="give --budget-calls instead"):
        answer_all(engine_of(ask, budget=Budget(tokens=100)), 1)
    engine = engine_of(ask)
    answer_all(engine, 1)
    assert engine.spending.uncounted_calls == 5
    for wrong in ({"tokens": 0}, {"calls": -1}):
        with pytest.raises(UserError, match="give 1 or more"):
            Budget(**wrong)


def test_interrupted_it_returns_what_it_has_and_abandons_the_calls_under_way() -> None:
    release = threading.Event()

    def ask(prompt: Prompt) -> EndpointAnswer:
        if prompt.text != "0":
            release.wait(30)
        return echo(prompt)

    engine = engine_of(ask)
    flow = flow_of(engine, 1)
    flow.submit(PROMPTS)
    ((number, completions),) = flow.next(until_needed=False)
    assert (number, len(completions)) == (0, 1)
    left = flow.next(lambda: True, until_needed=False)
    release.set()
    assert dict(left) == {i: [] for i in range(1, 5)}
    assert not flow.unfinished_prompts
    assert engine.spending.abandoned_calls == 3
    assert flow.next() == []


def test_a_request_that_is_not_asked_for_yet_can_be_cancelled() -> None:
    engine = engine_of(echo, concurrency=1)
    flow = flow_of(engine, 2)
    flow.submit(PROMPTS[:2])
    for request in (2, 3, 3):
        flow.cancel(request)
    answers: dict[int, list[Completion]] = {}
    while flow.unfinished_prompts:
        for number, completions in flow.next(until_needed=False):
            answers.setdefault(number, []).extend(completions)
    assert {i: len(row) for i, row in answers.items()} == {0: 2, 1: 0}
    assert engine.spending.calls == 2


def test_what_a_call_raises_is_raised_and_one_that_never_ends_is_named() -> None:
    def fail(prompt: Prompt) -> EndpointAnswer:
        raise UserError("the endpoint refuses the call")

    with pytest.raises(UserError, match="refuses the call"):
        answer_all(engine_of(fail), 1)
    release = threading.Event()

    def hang(prompt: Prompt) -> EndpointAnswer:
        release.wait(30)
        return echo(prompt)

    with pytest.raises(DeadlineExceeded, match=r"waited 0.2 s for an answer of the endpoint at URL: see that it is up"):
        answer_all(engine_of(hang, call_seconds=0.2), 1)
    release.set()


def test_weights_of_the_run_are_never_loaded() -> None:
    engine = engine_of(echo)
    version = engine.version
    engine.load({}, ELSEWHERE)
    assert engine.version == version > Version(10**9, 10**9)
