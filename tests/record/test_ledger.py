"""The account of what was generated."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.record.ledger import TERMS, Ledger
from tba.record.summary import Lag

CLOSED = Ledger(
    generated=100, trained_once=60, trained_total=180, waiting=20, evicted=8, rejected=3, duplicate=5,
    in_flight_at_stop=4, evaluation=1000, auxiliary=500,
)  # fmt: skip


def test_a_ledger_closes_when_every_term_adds_up_to_what_was_generated() -> None:
    assert CLOSED.closes()
    assert CLOSED.accounted == 100


def test_one_lost_or_counted_twice_keeps_it_open() -> None:
    for term in ("trained_once", "waiting", "evicted", "rejected", "duplicate", "damaged", "in_flight_at_stop"):
        lost = replace(CLOSED, **{term: getattr(CLOSED, term) - 1})
        twice = replace(CLOSED, **{term: getattr(CLOSED, term) + 1})
        assert (lost.difference, lost.closes()) == (1, False)
        assert (twice.difference, twice.closes()) == (-1, False)


def test_uses_evaluation_and_rollouts_for_values_stand_apart_from_the_account() -> None:
    assert replace(CLOSED, trained_total=0, evaluation=0, auxiliary=0).closes()


def test_shares_and_uses_follow_from_the_counts() -> None:
    assert CLOSED.trained_share == 0.6
    assert CLOSED.mean_uses == 3.0
    assert CLOSED.samples_per_insert == pytest.approx(180 / 88)
    assert (Ledger().trained_share, Ledger().mean_uses, Ledger().samples_per_insert) == (0.0, 0.0, 0.0)


def test_counters_of_all_owners_are_gathered_by_unit() -> None:
    owners = {
        "searcher-0": {"generated_tokens": 70, "generated_trajectories": 7, "in_flight_tokens": 4, "rounds": 9},
        "searcher-1": {
            "generated_tokens": 30,
            "generated_trajectories": 3,
            "rejected_tokens": 3,
            "evaluation_tokens": 9,
            "auxiliary_tokens": 6,
        },
        "replay": {"waiting_tokens": 20, "evicted_tokens": 8, "duplicate_tokens": 5, "busy_milliseconds": 5},
        "trainer": {"trained_once_tokens": 60, "trained_total_tokens": 180},
    }
    tokens = Ledger.gather(owners, "tokens")
    assert tokens == replace(CLOSED, evaluation=9, auxiliary=6)
    assert tokens.closes()
    assert Ledger.gather(owners, "trajectories") == Ledger(generated=10)


def test_counts_by_the_names_of_the_terms_are_taken_as_they_are() -> None:
    assert Ledger.of({"waiting": 3, "evicted": 1, "prompts": 7}) == Ledger(waiting=3, evicted=1)


ledgers = st.builds(Ledger, **{name: st.integers(0, 10**12) for name in TERMS})


@given(ledgers, ledgers)
def test_differences_add_up_when_ledgers_do(a: Ledger, b: Ledger) -> None:
    assert (a + b).difference == a.difference + b.difference


def test_lag_of_a_histogram_is_weighted_by_uses() -> None:
    assert Lag.of({0: 10, 4: 10}) == Lag(2.0, 4.0, 4.0)
    assert Lag.of({1: 95, 50: 5}) == Lag(pytest.approx(3.45), 1.0, 50.0)
    assert Lag.of({1: 94, 7: 1, 50: 5, 90: 0}) == Lag(pytest.approx(3.51), 7.0, 50.0)
    assert Lag.of({}) == Lag(0.0, 0.0, 0.0)
