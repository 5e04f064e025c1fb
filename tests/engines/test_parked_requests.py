"""Requests that are cancelled in every state, and parked ones whose keys and values are dropped: equal completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_families import FAMILIES, Letters, ragged_prompts
from talker import Talker
from test_conversations import often_ending

from tba.engines.transformers import EngineSettings, TransformersEngine, TransformersFlow
from tba.types import Completion, IntArray, Sampling, StopReason, Version

PROMPTS = ragged_prompts(3, 9, 1, 9, 12, 3)


@dataclass
class Watcher(Talker):
    """A talker that does something with the flow whenever it is asked for replies."""

    look: Callable[[], None] = field(default=lambda: None)

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        self.look()
        return super().replies(wait)


def flow_of(partner: Talker | None, parked_gb: float | None = None, family: str = "llama") -> TransformersFlow:
    settings = EngineSettings(slots=3, max_completion_tokens=40, parked_gb=parked_gb)
    engine = TransformersEngine(often_ending(family), Letters(), settings, Version(0, 3))
    return engine.flow(2, Sampling(0.9), np.random.default_rng(0), partner)


def completed(flow: TransformersFlow, interrupted: Callable[[], bool] | None = None) -> list[list[Completion]]:
    found: dict[int, list[Completion]] = {}
    while len(found) < flow.prompts_submitted:
        found.update(flow.next(interrupted, until_needed=False))
    return [found[i] for i in range(len(found))]


def answered(partner: Talker | None, interrupted: Callable[[], bool] | None = None) -> list[list[Completion]]:
    flow = flow_of(partner)
    flow.submit(PROMPTS)
    return completed(flow, interrupted)


def require_equal(one: Completion, other: Completion) -> None:
    assert one.digest == other.digest
    assert one.stop_reason is other.stop_reason
    np.testing.assert_allclose(one.log_behavior, other.log_behavior, atol=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_requests_that_have_not_begun_leave_the_others_as_they_are(late: bool) -> None:
    whole, partner = answered(Talker(late=late)), Talker(late=late)
    flow = flow_of(partner)
    flow.submit(PROMPTS)
    for request in (3, 6, 7, 11):  # one of a prompt, both of another, and the last
        flow.cancel(request)
    found = completed(flow)
    assert [len(row) for row in found] == [2, 1, 2, 0, 2, 1]
    require_equal(found[1][0], whole[1][0])
    require_equal(found[5][0], whole[5][0])
    for i in (0, 2, 4):
        for one, other in zip(found[i], whole[i], strict=True):
            require_equal(one, other)
    for request in (3, 6, 7, 11):
        assert partner.ends[request].stop_reason is StopReason.INTERRUPTED
        assert len(partner.ends[request].tokens) == 0
    assert sorted(partner.ends) == list(range(12))


@pytest.mark.parametrize("has_partner", [False, True])
def test_growing_requests_end_where_they_are(has_partner: bool) -> None:
    whole = answered(Talker() if has_partner else None)
    flow = flow_of(Talker() if has_partner else None)
    flow.submit(PROMPTS)
    cancelled: list[int] = []

    def interrupted() -> bool:
        growing = [request.number for request in flow.request_R[: flow.extent]]
        if len(cancelled) < 3:
            cancelled.append(growing[0])
            flow.cancel(growing[0])
        return False

    found = completed(flow, interrupted)
    assert len(set(cancelled)) == 3
    ends = []
    for request in range(12):
        one, other = found[request // 2][request % 2], whole[request // 2][request % 2]
        if request in cancelled:
            ends.append(one.stop_reason)
            n = len(one.tokens)
            assert one.tokens.tolist() == other.tokens[:n].tolist()
            np.testing.assert_allclose(one.log_behavior, other.log_behavior[:n], atol=1e-5)
        else:
            require_equal(one, other)
    assert StopReason.INTERRUPTED in ends


def test_a_parked_request_ends_before_anybody_replies() -> None:
    whole, partner = answered(Talker(late=True)), Watcher(late=True)
    flow = flow_of(partner)
    flow.submit(PROMPTS)
    cancelled: set[int] = set()

    def look() -> None:
        waiting = {request: calls for calls, request, _ in partner.waiting if request in flow.parked_requests}
        for request, calls in waiting.items():
            if len(cancelled) < 4 and calls > 1:
                cancelled.add(request)
                partner.waiting = [item for item in partner.waiting if item[1] != request]
                flow.cancel(request)

    partner.look = look
    found = completed(flow)
    assert len(cancelled) == 4
    for request in range(12):
        one, other = found[request // 2][request % 2], whole[request // 2][request % 2]
        if request in cancelled:
            assert one.stop_reason is StopReason.INTERRUPTED
            assert one.tokens.tolist() == other.tokens[: len(one.tokens)].tolist()
            assert partner.ends[request] is one
        else:
            require_equal(one, other)


def test_a_request_that_has_ended_or_was_never_submitted_cannot_be_cancelled() -> None:
    whole, partner = answered(Talker(late=True)), Watcher(late=True)
    flow = flow_of(partner)
    flow.submit(PROMPTS)
    partner.look = lambda: [flow.cancel(request) for request in (*partner.ends, 12, 999)] and None
    for one, other in zip(completed(flow), whole, strict=True):
        for completion, expected in zip(one, other, strict=True):
            require_equal(completion, expected)


def test_a_cancelled_row_is_free_for_a_request_that_is_submitted_in_its_place() -> None:
    partner = Talker(most=1)
    flow = flow_of(partner)
    flow.submit(PROMPTS[:2])
    calls = 0

    def interrupted() -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            flow.submit(PROMPTS[2:3])
            for request in range(4):
                flow.cancel(request)
        return False

    found = completed(flow, interrupted)
    assert len(found[2]) == 2
    assert {completion.stop_reason for completion in found[2]} <= {StopReason.EOS, StopReason.LENGTH}
    assert flow.extent == len(flow.free_rows)
    assert flow.next() == []


def test_prompts_that_a_partner_submits_while_it_is_asked_are_answered_as_if_all_had_been_there() -> None:
    whole, partner = answered(Talker(late=True)), Watcher(late=True)
    flow, left = flow_of(partner), list(PROMPTS)

    def submit_next() -> bool:
        if left:
            flow.submit([left.pop(0)])
        return False

    partner.look = lambda: submit_next() and None
    submit_next()
    found: dict[int, list[Completion]] = {}
    while len(found) < len(PROMPTS):
        found.update(flow.next(submit_next, until_needed=False))
    for i, row in enumerate(whole):
        for one, other in zip(found[i], row, strict=True):
            require_equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_whose_keys_and_values_were_dropped_goes_on_exactly_where_it_was(family: str) -> None:
    flows, partners = [], [Watcher(late=True) for _ in range(4)]
    budgets = (None, 1.0, 2e-5, 0.0)
    most_bytes = [0, 0, 0, 0]
    for i, (parked_gb, partner) in enumerate(zip(budgets, partners, strict=True)):
        flow = flow_of(partner, parked_gb, family)
        flow.submit(PROMPTS)

        def look(i: int = i, flow: TransformersFlow = flow) -> None:
            most_bytes[i] = max(most_bytes[i], flow.parked_bytes)

        partner.look = look
        flows.append((flow, completed(flow)))
    default, unlimited, scarce, none = (flow for flow, _ in flows)
    assert default.dropped_copies == unlimited.dropped_copies == 0
    assert 0 < scarce.dropped_copies < none.dropped_copies
    assert 20_000 < most_bytes[0] == most_bytes[1]
    assert 0 < most_bytes[2] <= 20_000
    assert most_bytes[3] == 0
    assert all(flow.parked_bytes == 0 for flow, _ in flows)
    expected = flows[0][1]
    for _, found in flows[1:]:
        for row, others in zip(found, expected, strict=True):
            for one, other in zip(row, others, strict=True):
                require_equal(one, other)
