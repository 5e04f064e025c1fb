"""Prompts that are submitted while others are answered: equal answers, fuller rows, weights that change in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_families import build, plain_log_probabilities, ragged_prompts
from test_transformers_engine import engine_of, tokens_of

from tba.engines import transformers
from tba.engines.transformers import TransformersEngine, TransformersFlow
from tba.generation import generate
from tba.types import Completion, Prompt, Sampling, StopReason, Version

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def _few_prompts_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "PREFILL_TOKENS", 16)


def flowed(engine: TransformersEngine, prompts: list[Prompt], count: int, sampling: Sampling) -> list[list[Completion]]:
    """The completions of all prompts, each of which is submitted as soon as one is wanted."""
    flow, left, found = engine.flow(count, sampling, np.random.default_rng(0)), list(prompts), {}
    while left or flow.queue.prompts:
        wanted, left = left[: flow.prompts_needed], left[flow.prompts_needed :]
        flow.submit(wanted)
        found.update(flow.next(until_needed=bool(left)))
    return [found[i] for i in range(len(prompts))]


def test_prompts_that_come_one_by_one_are_answered_like_those_that_come_together() -> None:
    prompts = ragged_prompts(3, 9, 1, 9, 12, 3, 7, 2)  # the longest come when the cache has room for shorter ones only
    for family in ("llama", "gemma3"):
        model = build(family)
        together = generate(engine_of(model), prompts, 2, GREEDY, np.random.default_rng(0))
        assert tokens_of(flowed(engine_of(model), prompts, 2, GREEDY)) == tokens_of(together)


def test_answers_of_many_lengths_leave_hardly_a_row_empty_where_rounds_leave_many() -> None:
    model, prompts = build("llama"), ragged_prompts(*[3, 5, 8, 4] * 12)
    rows: list[int] = []

    def see(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].shape[1] == 1:
            rows.append(len(kwargs["input_ids"]))

    model.register_forward_pre_hook(see, with_kwargs=True)
    engine = engine_of(model, slots=16, max_completion_tokens=40)
    flow = engine.flow(2, Sampling(), np.random.default_rng(0))
    left = list(prompts)
    while left:
        wanted, left = left[: flow.prompts_needed], left[flow.prompts_needed :]
        flow.submit(wanted)
        flow.next()
    of_flow, rows[:] = np.mean(rows) / 16, []
    flow.next(lambda: True)
    for first in range(0, len(prompts), 8):
        generate(engine, prompts[first : first + 8], 2, Sampling(), np.random.default_rng(0))
    assert of_flow >= 0.97
    assert np.mean(rows) / 16 < 0.8


def test_weights_that_are_loaded_in_between_sample_from_there_on_and_an_answer_says_so() -> None:
    model, other = build("llama"), build("llama", seed=1)
    # prompts are read two at a time, some rows of which are begun under the other weights
    engine, prompts = engine_of(model, slots=4), ragged_prompts(3, 9, 4, 6, 5, 7, 3, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flow = engine.flow(2, Sampling(), np.random.default_rng(0))
    flow.submit(prompts)
    first = flow.next(until_needed=False)
    engine.load(dict(other.state_dict()), Version(0, 4))
    rest: list[tuple[int, list[Completion]]] = []
    while flow.queue.prompts:
        rest += flow.next(until_needed=False)
    model.load_state_dict(before)
    of = {(Version(0, 3), Version(0, 3)): model, (Version(0, 4), Version(0, 4)): other}
    seen = set()
    for i, completions in (*first, *rest):
        for c in completions:
            seen.add(c.versions)
            if c.versions in of:  # begun and ended under the same weights
                expected = plain_log_probabilities(of[c.versions], prompts[i], c.tokens, 1.0)
                at = expected[torch.arange(len(c.tokens)), torch.from_numpy(c.tokens.astype(np.int64))]
                np.testing.assert_allclose(c.log_behavior, at, atol=1e-4)
    assert seen == {*of, (Version(0, 3), Version(0, 4))}


def test_a_flow_that_is_told_to_stop_hands_out_all_it_has() -> None:
    flow: TransformersFlow = engine_of(build("llama"), slots=4).flow(3, Sampling(), np.random.default_rng(0))
    assert (flow.prompts_needed, flow.next()) == (2, [])
    flow.submit(ragged_prompts(3, 4))
    assert flow.prompts_needed == 0
    found = dict(flow.next(lambda: True))
    assert sorted(found) == [0, 1]
    assert {c.stop_reason for completions in found.values() for c in completions} == {StopReason.INTERRUPTED}
    assert not flow.queue.prompts
    assert flow.next() == []
