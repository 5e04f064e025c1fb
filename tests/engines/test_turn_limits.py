"""Turns with limits of their own, against cutting by hand, and what a partner is told of each turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from engine_families import Letters, plain_log_probabilities, ragged_prompts
from talker import Talker
from test_conversations import often_ending

from tba.engines.stopping import StopStrings
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.errors import UserError
from tba.generation import stream
from tba.protocols import Turn, TurnLimits
from tba.types import Completion, Sampling, StopReason, Version

PROMPTS = ragged_prompts(3, 9, 1, 9, 12, 3)


@dataclass
class Listener(Talker):
    """A talker that keeps all it is told."""

    heard: dict[int, list[Turn]] = field(default_factory=dict)

    def hear(self, turns: Sequence[Turn]) -> None:
        super().hear(turns)
        for turn in turns:
            self.heard.setdefault(turn.request, []).append(turn)


@dataclass
class Limiter(Listener):
    """A talker that limits the turns of each request in its own way."""

    limits: Sequence[TurnLimits] = (TurnLimits(),)

    def turn_limits(self, request: int) -> TurnLimits:
        return self.limits[request % len(self.limits)]


@dataclass
class Silent(Limiter):
    """A partner that has every turn go on behind nothing."""

    def answer(self, text: str) -> list[int]:
        return []


def played(partner: Talker, slots: int = 5, engine_stops: tuple[str, ...] = ()) -> list[Completion]:
    settings = EngineSettings(slots=slots, max_completion_tokens=40, stop_strings=engine_stops)
    engine = TransformersEngine(often_ending("llama"), Letters(), settings, Version(0, 3))
    found = dict(stream(engine, PROMPTS, 4, Sampling(0.9), np.random.default_rng(0), partner=partner))
    return [completion for i in range(len(PROMPTS)) for completion in found[i]]


@pytest.mark.parametrize("slots", [1, 5, 24])
def test_a_turn_ends_where_cutting_the_whole_one_by_hand_ends_it(slots: int) -> None:
    limits = (
        TurnLimits(),
        TurnLimits(1),
        TurnLimits(6),
        TurnLimits(None, ("c", "de")),
        TurnLimits(9, ("k", "mno", "b")),
    )
    whole, partner = played(Listener(most=1), slots), Limiter(most=1, limits=limits)
    reasons = set()
    for request, (completion, uncut) in enumerate(zip(played(partner, slots), whole, strict=True)):
        limit, tokens = limits[request % len(limits)], uncut.tokens.tolist()
        stops = StopStrings(limit.stop_strings, Letters())
        length, _, has_stop = stops.cut(tokens)
        reason = StopReason.STOP_STRING if has_stop else uncut.stop_reason
        if limit.max_tokens is not None and limit.max_tokens < length:
            length, reason = limit.max_tokens, StopReason.LENGTH
        assert completion.tokens.tolist() == tokens[:length]
        assert completion.stop_reason is reason
        assert completion.log_behavior is not None
        assert uncut.log_behavior is not None
        np.testing.assert_allclose(completion.log_behavior, uncut.log_behavior[:length], atol=1e-5)
        heard = partner.heard.get(request)
        assert (heard is None) == (length == 40)  # the whole completion's limit ends it unheard
        reasons.add((limit, reason))
    assert {(limits[2], StopReason.LENGTH), (limits[3], StopReason.STOP_STRING)} < reasons


def test_a_turn_that_goes_on_behind_nothing_goes_on_as_if_it_had_no_limit() -> None:
    whole = played(Listener(most=1))
    partner = Silent(most=99, limits=[TurnLimits(3), TurnLimits(5), TurnLimits(1)])
    for request, (completion, uncut) in enumerate(zip(played(partner, 7), whole, strict=True)):
        n = len(uncut.tokens)
        assert completion.tokens[:n].tolist() == uncut.tokens.tolist()
        assert completion.log_behavior is not None
        np.testing.assert_allclose(completion.log_behavior[:n], uncut.log_behavior, atol=1e-5)
        lengths = [len(turn.tokens) for turn in partner.heard[request]]
        assert max(lengths) == partner.turn_limits(request).max_tokens


@pytest.mark.parametrize("late", [False, True])
def test_turns_say_what_was_sampled_with_the_log_probabilities_of_their_completion(late: bool) -> None:
    limits = [TurnLimits(4), TurnLimits(None, ("c",)), TurnLimits()]
    partner = Limiter(most=4, late=late, limits=limits)
    model = often_ending("llama")
    for request, completion in enumerate(played(partner, engine_stops=("de",))):
        turns, spans = partner.heard.get(request, []), completion.turns
        for turn, (begin, end) in zip(turns, spans[: len(turns)], strict=True):
            assert list(turn.tokens) == completion.tokens[begin:end].tolist()
            assert completion.log_behavior is not None
            np.testing.assert_array_equal(turn.log_behavior, completion.log_behavior[begin:end])
            assert turn.room == 40 - end
            assert turn.versions == (Version(0, 3), Version(0, 3))
            assert not any(stop in turn.text for stop in ("de", *limits[request % 3].stop_strings))
        rows = plain_log_probabilities(model, PROMPTS[request // 4], completion.tokens, 0.9)
        expected = rows[torch.arange(len(rows)), torch.from_numpy(completion.tokens.astype(np.int64))].numpy()
        mask = np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask
        np.testing.assert_allclose(completion.log_behavior, np.where(mask, expected, 0.0), atol=1e-4)
    reasons = [turn.stop_reason for turns in partner.heard.values() for turn in turns]
    assert set(reasons) == {StopReason.EOS, StopReason.STOP_STRING, StopReason.LENGTH}


def test_limits_that_nothing_reaches_change_nothing() -> None:
    for one, other in zip(played(Listener()), played(Limiter(limits=[TurnLimits(40, ("~",))])), strict=True):
        assert one.digest == other.digest
        assert one.log_behavior is not None
        assert one.log_behavior.tobytes() == other.log_behavior.tobytes()
        assert one.stop_reason is other.stop_reason


def test_a_turn_names_the_weights_that_sampled_it() -> None:
    engine = TransformersEngine(
        often_ending("llama"), Letters(), EngineSettings(slots=4, max_completion_tokens=40), Version(0, 3)
    )
    partner, calls = Limiter(most=4, limits=[TurnLimits(9)]), 0

    def interrupted() -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            engine.load(dict(often_ending("llama").state_dict()), Version(0, 4))
        return False

    list(stream(engine, PROMPTS, 2, Sampling(), np.random.default_rng(0), interrupted, partner))
    versions = [turn.versions for turns in partner.heard.values() for turn in turns]
    old, new = Version(0, 3), Version(0, 4)
    assert set(versions) == {(old, old), (old, new), (new, new)}
    for turns in partner.heard.values():
        named = [version for turn in turns for version in turn.versions]
        assert named == sorted(named)


@pytest.mark.parametrize(("tokens", "strings"), [(0, ()), (-1, ()), (3, ("a", ""))])
def test_limits_that_leave_no_token_are_refused(tokens: int, strings: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="a turn"):
        TurnLimits(tokens, strings)
