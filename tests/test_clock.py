"""Where the wall-clock went, with a clock that is set by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.clock import ShareClock, State, combined_share


class Hand:
    """A clock that goes only when it is told to."""

    time = 50.0

    def __call__(self) -> float:
        return self.time


def test_the_inner_of_nested_states_counts() -> None:
    hand = Hand()
    clock = ShareClock(now=hand)
    hand.time += 1
    with clock.state("idle"):
        hand.time += 2
        with clock.state("eval"):
            hand.time += 4
        hand.time += 8
    hand.time += 16
    assert clock.seconds() == {"busy": 17, "idle": 10, "eval": 4}


def test_a_state_ends_with_an_exception_too() -> None:
    hand = Hand()
    clock = ShareClock(now=hand)

    @clock.state("paced")
    def fail() -> None:
        hand.time += 3
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    hand.time += 5
    assert clock.seconds() == {"paced": 3, "busy": 5}


def test_a_wait_may_change_its_reason_while_it_lasts() -> None:
    hand = Hand()
    clock = ShareClock(now=hand)
    with clock.state("idle"):
        hand.time += 1
        clock.reclassify("paced")
        hand.time += 2
    hand.time += 4
    clock.reclassify("idle")
    hand.time += 8
    assert clock.seconds() == {"idle": 1 + 8, "paced": 2, "busy": 4}


def test_time_before_the_end_of_warm_up_is_warm_up_whatever_the_state() -> None:
    hand = Hand()
    clock = ShareClock(is_warming_up=True, now=hand)
    with clock.state("idle"):
        hand.time += 100
        clock.end_warm_up()
        hand.time += 1
    hand.time += 3
    clock.end_warm_up()
    assert clock.seconds() == {"warm_up": 100, "idle": 1, "busy": 3}
    assert clock.share("idle") == 0.25
    assert not clock.is_warming_up


def test_a_state_that_is_still_open_is_counted_up_to_now() -> None:
    hand = Hand()
    clock = ShareClock(now=hand)
    with clock.state("idle"):
        hand.time += 2
        assert clock.seconds()["idle"] == 2
        hand.time += 1
    assert clock.seconds()["idle"] == 3


states: st.SearchStrategy[State] = st.sampled_from(["busy", "idle", "paced", "eval"])


@given(st.lists(st.tuples(states, st.integers(0, 100))), st.integers(0, 10))
def test_seconds_of_all_states_add_up_to_the_whole(spans: list[tuple[State, int]], warm: int) -> None:
    hand = Hand()
    clock = ShareClock(is_warming_up=True, now=hand)
    for i, (name, seconds) in enumerate(spans):
        if i == warm:
            clock.end_warm_up()
        with clock.state(name):
            hand.time += seconds
    assert sum(clock.seconds().values()) == sum(seconds for _, seconds in spans)


def test_the_share_of_several_loops_is_weighted_by_their_time() -> None:
    assert combined_share([{"idle": 1, "busy": 9}, {"idle": 20, "busy": 10, "warm_up": 500}], "idle") == 21 / 40
    assert combined_share([], "idle") == 0.0
