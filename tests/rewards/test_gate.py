"""How many calls a server is asked to take at once, under a clock that stands still or is turned by hand."""

from __future__ import annotations

import functools
import heapq
import threading
from typing import Any

import pytest
from tests.rewards.endpoint_server import Reply, said, serving

import tba
from tba.errors import DeadlineExceeded
from tba.rewards.gate import Gate, Limit, PendingCall
from tba.rewards.threads import run_in_threads


def succeed(limit: Limit, calls: int, seconds: float = 1.0) -> int:
    for _ in range(calls):
        limit.record_success(seconds)
    return limit.calls


def test_it_grows_by_one_after_as_many_successes_as_it_allows_calls_and_never_above_the_highest() -> None:
    limit = Limit(18)
    assert limit.calls == 16
    assert succeed(limit, 15) == 16
    assert succeed(limit, 1) == 17
    assert succeed(limit, 17) == 18
    assert succeed(limit, 100) == 18
    assert Limit(3).calls == 3


def test_a_refusal_halves_it_once_for_all_calls_that_were_under_way_together_and_never_below_1() -> None:
    limit = Limit(64)
    for _ in range(16):
        limit.record_refusal(0)
    assert limit.calls == 8
    seen = []
    for halvings in range(1, 6):
        limit.record_refusal(halvings)
        seen.append(limit.calls)
    assert seen == [4, 2, 1, 1, 1]


def test_it_does_not_grow_while_calls_are_slow_and_what_stays_slow_becomes_the_measure() -> None:
    limit = Limit(64)
    assert succeed(limit, 16, 1.0) == 17
    assert succeed(limit, 17, 3.0) == 18  # three times the best is still allowed
    assert succeed(limit, 18 * 15, 3.1) == 18
    assert succeed(limit, 18, 3.1) == 19  # the window of the 1.0 is no longer among the last 16
    assert succeed(limit, 19, 3.1) == 20


def test_a_call_says_nothing_of_a_higher_limit_unless_the_limit_was_reached() -> None:
    gate = Gate("a server", 4, clock=lambda: 0.0)
    gate.limit.calls = 2
    for _ in range(10):  # one after another
        gate.leave(done(gate.enter(0.0)))
    assert gate.limit.calls == 2
    turns = [gate.enter(0.0), gate.enter(0.0)]
    gate.leave(done(turns[0]))
    turns[0] = gate.enter(0.0)
    gate.leave(done(turns[1]))
    assert gate.limit.calls == 3


def done(turn: PendingCall) -> PendingCall:
    turn.seconds = 1.0
    return turn


def test_retry_after_closes_the_gate_for_everybody_until_then() -> None:
    now = [100.0]
    gate = Gate("a server", 4, clock=lambda: now[0])
    turn = gate.enter(0.0)
    turn.is_refused, turn.pause = True, 7.0
    gate.leave(turn)
    now[0] = 106.9
    with pytest.raises(DeadlineExceeded, match="waited 0 s for one of the 2 calls at once that a server takes"):
        gate.enter(0.0)
    now[0] = 107.0
    assert gate.enter(0.0).halvings == 1
    assert gate.active_calls == 1


def test_calls_pass_in_the_order_in_which_they_come_and_one_that_gives_up_holds_up_nobody() -> None:
    gate = Gate("a server", 1)
    turn, order = gate.enter(0.0), []

    def call(number: int) -> None:
        with gate.turn(30.0):
            order.append(number)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(5)]
    for n, thread in enumerate(threads):
        thread.start()
        while len(gate._queue) <= n:
            threading.Event().wait(0.001)
        if n == 2:
            with pytest.raises(DeadlineExceeded):
                gate.enter(0.0)
    gate.leave(turn)
    for thread in threads:
        thread.join(10)
    assert (order, gate.active_calls) == ([0, 1, 2, 3, 4], 0)


@pytest.mark.parametrize("takes", [1, 5, 20, 40])
def test_a_server_that_refuses_beyond_a_number_is_used_to_most_of_it_and_refuses_few(takes: int) -> None:
    """Simulates a server whose calls take a second and refusals no time; there is always a call that waits to begin."""
    now, ends, refused, finished, number = 0.0, [], 0, 0, 0
    gate = Gate("a server", 64, clock=lambda: now)
    while now < 300:
        while gate.active_calls < gate.limit.calls:
            turn, number = gate.enter(0.0), number + 1
            if len(ends) >= takes:
                turn.is_refused, refused = True, refused + 1
                gate.leave(turn)
                if takes == 1 or gate.limit.calls == 1:
                    break  # the limit is as low as can be: wait for a call to end
            else:
                heapq.heappush(ends, (now + 1 + number * 1e-6, number, turn))
        now, _, turn = heapq.heappop(ends)
        gate.leave(done(turn))
        finished += 1
    assert finished >= 0.6 * 300 * takes
    assert refused <= 0.1 * finished + 16 if takes > 1 else refused <= finished


def test_a_server_on_loopback_that_limits_parallel_calls_refuses_few_and_is_kept_busy() -> None:
    takes, lock = 12, threading.Lock()
    under_way: list[int] = []  # when each call that was taken began, itself included
    busy, refused = 0, 0

    def reply(n: int, body: dict[str, Any]) -> Reply:
        nonlocal busy, refused
        with lock:
            if busy >= takes:
                refused += 1
                return 429, {}, b"{}"
            busy += 1
            under_way.append(busy)
        threading.Event().wait(0.03)
        with lock:
            busy -= 1
        return said([body["messages"][-1]["content"]])

    with serving() as server:
        server.script = reply
        ask = tba.Endpoint(url=server.url, model="m", pause=0.01, retries=20).start()
        messages = [str(i) for i in range(600)]
        replies = run_in_threads([functools.partial(ask, m) for m in messages], 64, 60.0, lambda i: messages[i])
    assert replies == messages
    assert refused <= 60  # of 600: without a gate 52 of the 64 at once are
    assert sum(under_way) / len(under_way) >= takes / 2
