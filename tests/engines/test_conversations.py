"""Completions in several turns: what an engine reads between them, against the plain forward and against each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch
from engine_families import EOS, FAMILIES, WINDOW, Letters, build, plain_log_probabilities, ragged_prompts
from talker import Talker

from tba.engines import transformers
from tba.engines.slots import Continuations, slot_attention
from tba.engines.step import _HostWaitDetector
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.generation import stream
from tba.types import Completion, Prompt, Sampling, StopReason, Version


def converse(
    family: str,
    partner: Talker,
    slots: int = 5,
    prompts: Sequence[Prompt] = (),
    stop: tuple[str, ...] = (),
    penalty: float = 1.0,
) -> list[list[Completion]]:
    prompts = prompts or ragged_prompts(3, 9, 1, 9, 12, 3)
    settings = EngineSettings(slots=slots, max_completion_tokens=40, stop_strings=stop)
    engine = TransformersEngine(often_ending(family), Letters(), settings, Version(0, 3))
    sampling = Sampling(0.9, repetition_penalty=penalty)
    found = dict(stream(engine, prompts, 4, sampling, np.random.default_rng(0), partner=partner))
    return [found[i] for i in range(len(prompts))]


def flat(answers: list[list[Completion]]) -> list[Completion]:
    return list(chain.from_iterable(answers))


def often_ending(family: str) -> torch.nn.Module:
    """A model of a family that gives EOS about one time in eight, so that most completions have several turns."""
    model = build(family)
    head = model.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0])
    bias[EOS] = 2.0
    head.bias = torch.nn.Parameter(bias if head.bias is None else head.bias.detach() + bias)
    return model


@pytest.fixture(autouse=True)
def _few_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "PREFILL_TOKENS", 16)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sampled_after_an_observation_has_the_plain_forwards_log_probability_to_1e_4(
    family: str, late: bool
) -> None:
    model, prompts, partner = often_ending(family), ragged_prompts(3, 9, 1, 9, 12, 3), Talker(late=late)
    several = longest = 0
    for i, (prompt, group) in enumerate(zip(prompts, converse(family, partner), strict=True)):
        assert len(group) == 4
        for j, completion in enumerate(group):
            mask = np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask
            rows = plain_log_probabilities(model, prompt, completion.tokens, 0.9)
            expected = rows[torch.arange(len(rows)), torch.from_numpy(completion.tokens.astype(np.int64))].numpy()
            np.testing.assert_allclose(completion.log_behavior, np.where(mask, expected, 0.0), atol=1e-4)
            turns = partner.turns.get(4 * i + j, [])
            heard = [token for text in turns for token in partner.answer(text)]
            assert completion.tokens[~mask].tolist() == heard[: completion.observed]
            several += len(turns) > 1
            longest = max(longest, len(prompt.tokens) + len(completion.tokens))
    assert several >= 8
    assert longest > 4 * WINDOW


@cache
def at_7_slots() -> list[list[Completion]]:
    return converse("llama", Talker(), slots=7)


@pytest.mark.parametrize(("slots", "late"), [(1, False), (3, True), (24, True), (100, False)])
def test_neither_the_number_of_slots_nor_who_answers_late_changes_a_completion(slots: int, late: bool) -> None:
    found = converse("llama", Talker(late=late), slots=slots)
    for one, other in zip(flat(at_7_slots()), flat(found), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.digest == other.digest
        assert one.stop_reason is other.stop_reason


@pytest.mark.parametrize("late", [False, True])
def test_every_token_is_read_exactly_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts, read = often_ending("qwen3"), ragged_prompts(3, 9, 5), []
    engine = TransformersEngine(model, Letters(), EngineSettings(slots=4, max_completion_tokens=40))
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True)
    found = dict(stream(engine, prompts, 5, Sampling(), np.random.default_rng(2), partner=Talker(late=late)))
    answers = [c for row in found.values() for c in row]
    # The last token of a completion is drawn and never read.
    assert sum(read) == sum(len(p.tokens) for p in prompts) + sum(len(c.tokens) - 1 for c in answers)
    assert sum(c.observed for c in answers) > 10


def test_reading_what_was_answered_never_waits_for_the_device() -> None:
    model = build("llama")
    engine = TransformersEngine(model, Letters(), EngineSettings(slots=4, max_completion_tokens=40))
    with torch.inference_mode(), slot_attention(model):
        packed = engine.prefill(ragged_prompts(9))
        cache = engine.cache(packed, 30, 0)
        cache.fill(range(4), packed, 0)
        said = Continuations(cache, [0, 2, 3], [9, 9, 9], [torch.arange(n) for n in (3, 5, 3)])
        with _HostWaitDetector() as detector:
            said.run(model)
    assert detector.operation is None


def test_a_stop_string_ends_a_turn_and_what_was_generated_behind_it_is_forgotten() -> None:
    partner = Talker()
    expected = converse("llama", Talker(), slots=1, stop=("c", "de"))
    found = converse("llama", partner, slots=9, stop=("c", "de"))
    assert [c.tokens.tolist() for c in flat(found)] == [c.tokens.tolist() for c in flat(expected)]
    assert partner.reasons.count(StopReason.STOP_STRING) > 5
    assert not any("c" in text or "de" in text for turns in partner.turns.values() for text in turns)


def test_a_penalty_looks_at_what_was_read_and_said_and_not_at_what_was_drawn_behind_the_end_of_a_turn() -> None:
    model, prompts, penalty = often_ending("llama"), ragged_prompts(3, 9, 1, 9, 12, 3), 1.5
    for prompt, group in zip(prompts, converse("llama", Talker(), stop=("c", "de"), penalty=penalty), strict=True):
        for completion in group:
            ids = torch.tensor([*prompt.tokens.tolist(), *completion.tokens.tolist()])
            logits_TV = model(input_ids=ids[None]).logits[0].detach()
            mask = np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask
            for t in np.flatnonzero(mask):
                read = ids[: len(prompt.tokens) + t]
                logits_V, known = logits_TV[len(read) - 1].clone(), read.unique()
                logits_V[known] = torch.where(logits_V[known] > 0, logits_V[known] / penalty, logits_V[known] * penalty)
                expected = (logits_V / 0.9).log_softmax(-1)[ids[len(read)]].item()
                assert completion.log_behavior is not None
                assert abs(completion.log_behavior[t] - expected) < 1e-4


def test_a_conversation_without_room_for_an_answer_ends_as_truncated_and_is_handed_to_its_partner() -> None:
    partner = Talker(most=99)
    found = flat(converse("llama", partner))
    assert {c.stop_reason for c in found} == {StopReason.LENGTH}
    assert max(len(c.tokens) for c in found) == 40
    assert [partner.ends[request] for request in range(24)] == found


def test_an_interruption_hands_out_what_is_there_with_its_mask() -> None:
    calls = 0

    def interrupted() -> bool:
        nonlocal calls
        calls += 1
        return calls > 3

    engine = TransformersEngine(often_ending("llama"), Letters(), EngineSettings(slots=4, max_completion_tokens=40))
    partner = Talker(most=99, late=True)
    found = dict(
        stream(engine, ragged_prompts(3, 4), 4, Sampling(), np.random.default_rng(0), interrupted, partner=partner)
    )
    answers = [c for row in found.values() for c in row]
    assert StopReason.INTERRUPTED in {c.stop_reason for c in answers}
    assert any(c.observed for c in answers)
    assert all(c.log_behavior is not None and len(c.log_behavior) == len(c.tokens) for c in answers)
