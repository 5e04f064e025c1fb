"""Prompts chosen by what is believed of them: the belief, whom it favours, whom it forgets, and that leases hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.protocols import PromptSource
from tba.replay.journal import JournalWriter
from tba.rollout.posterior import Posterior, PosteriorSettings
from tba.rollout.prompts import PosteriorPrompts, PromptSettings, UniformPrompts
from tba.types import Prompt

S = 16  # answers to a prompt each time
Rates = npt.NDArray[np.float64]


def test_the_posterior_is_that_of_the_counts_while_nothing_fades() -> None:
    posterior = Posterior(3, PosteriorSettings(discount=1.0, fading=1.0, prior=0.5))
    posterior.update([(1, 3.0, 5.0), (0, 2.0, 0.0), (1, 1.0, 7.0)])
    alpha, beta = posterior.parameters()
    assert alpha.tolist() == [2.5, 4.5, 0.5]
    assert beta.tolist() == [0.5, 12.5, 0.5]


def test_what_was_seen_fades_with_the_next_answers_and_with_an_epochs_worth_of_others() -> None:
    posterior = Posterior(4, PosteriorSettings(discount=0.5))
    posterior.update([(0, 8.0, 0.0)])
    posterior.update([(i, 0.0, 0.0) for i in (1, 2, 3, 1)])  # as many as there are prompts
    assert posterior.parameters()[0][0] == 1 + 8 / 2
    posterior.update([(i, 0.0, 0.0) for i in (2, 3, 1)])
    posterior.update([(0, 4.0, 2.0)])  # two epochs after the first, and its next
    alpha, beta = posterior.parameters()
    assert (alpha[0], beta[0]) == (1 + 8 / 2**3 + 4, 1 + 2)


def test_without_fading_only_a_prompts_own_answers_discount_it() -> None:
    posterior = Posterior(4, PosteriorSettings(discount=0.5, fading=1.0))
    posterior.update([(0, 8.0, 0.0), *((i, 0.0, 3.0) for i in (1, 2, 3, 1, 2, 3, 1))])
    assert posterior.parameters()[0][0] == 1 + 8
    posterior.update([(0, 4.0, 2.0)])
    alpha, beta = posterior.parameters()
    assert (alpha[0], beta[0], beta[1]) == (1 + 8 / 2 + 4, 1 + 2, 1 + 3 / 4 + 3 / 2 + 3)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 9), st.floats(0, 9)), max_size=30), st.integers(0, 30))
def test_it_matters_in_which_order_outcomes_came_but_not_in_how_many_portions(
    outcomes: list[tuple[int, float, float]], cut: int
) -> None:
    whole, parts = (Posterior(6, PosteriorSettings()) for _ in range(2))
    whole.update(outcomes)
    parts.update(outcomes[:cut])
    parts.parameters()
    parts.update(outcomes[cut:])
    np.testing.assert_array_equal(np.stack(whole.parameters()), np.stack(parts.parameters()))
    orders = [p.order(np.random.default_rng(3)).tolist() for p in (whole, parts)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(6))


def test_rewards_between_failure_and_success_count_for_both_in_proportion() -> None:
    settings = PosteriorSettings(failure=-1.0, success=3.0)
    assert settings.outcome(7, [-1.0, 3.0, 1.0, 9.0, 0.0]) == (7, 0 + 1 + 0.5 + 1 + 0.25, 5 - 2.75)


@pytest.mark.parametrize(
    ("field", "value"),
    [("target", 1.5), ("discount", 0.0), ("discount", 1.1), ("fading", 0.0), ("prior", 0.0), ("failure", 1.0)],
)
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"--prompts\.posterior\.{field} is {value}"):
        PosteriorSettings(**{field: value})


def rates_of(prompts: int, rng: np.random.Generator) -> Rates:
    """A fifth of the prompts is always solved, a fifth now and then (0.3 to 0.7), the rest never."""
    fifth = prompts // 5
    rates = np.concatenate([np.ones(fifth), rng.uniform(0.3, 0.7, fifth), np.zeros(prompts - 2 * fifth)])
    return rng.permutation(rates)


class Journal:
    """The journal's part in it, for one searcher: every position is free, and what was told is kept."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, float, float]] = []

    def lease(self, order: list[int], count: int) -> list[int]:
        return order[:count]

    def after(self, number: int) -> list[tuple[int, int, float, float]]:
        return self.told[number:]

    def put(self, outcomes: list[tuple[int, float, float]]) -> None:
        self.told += [(len(self.told) + i, *outcome) for i, outcome in enumerate(outcomes, start=1)]


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt("t", np.array([n + 1], dtype=np.int32), str(n)) for n in range(count)]


def source(selection: str, prompts: int, seed: int, journal: Journal) -> PromptSource:
    rng, lease = np.random.default_rng([seed, 1]), journal.lease
    if selection == "uniform":
        return UniformPrompts(prompts_of(prompts), rng, lease)
    return PosteriorPrompts(prompts_of(prompts), rng, lease, journal.after, PosteriorSettings())


def play(selection: str, rates: Rates, rounds: int, seed: int, each: int = 5) -> tuple[list[float], list[list[int]]]:
    """The share of varied groups in each round, and the positions taken; answers are coins of the prompts' rates."""
    journal, coins = Journal(), np.random.default_rng(seed)
    prompts, varied, taken = source(selection, len(rates), seed, journal), [], []
    for _ in range(rounds):
        positions, _ = prompts.take(each)
        rewards = {p: (coins.random(S) < rates[p]).astype(float).tolist() for p in positions}
        journal.put(list(prompts.outcomes(rewards)))
        varied.append(float(np.mean([0 < sum(r) < S for r in rewards.values()])))
        taken.append(positions)
    return varied, taken


@pytest.mark.parametrize("seed", range(3))
def test_once_it_knows_the_prompts_the_posterior_spends_three_times_as_many_rounds_where_rewards_vary(
    seed: int,
) -> None:
    rates = rates_of(200, np.random.default_rng(seed))
    epoch = 200 // 5
    share = {name: play(name, rates, 8 * epoch, seed)[0] for name in ("uniform", "posterior")}
    assert np.mean(share["uniform"]) == pytest.approx(0.2, abs=0.03)
    assert np.mean(share["posterior"][2 * epoch :]) > 3 * np.mean(share["uniform"][2 * epoch :])
    assert np.mean(share["posterior"][:epoch]) > 1.5 * np.mean(share["uniform"][:epoch])  # already while it learns


def test_no_prompt_starves() -> None:
    """In 40 epochs' worth of rounds nobody waits for more than a fifth of them, solved or unsolved as it may be."""
    rates, epoch = rates_of(200, np.random.default_rng(0)), 200 // 5
    _, taken = play("posterior", rates, 40 * epoch, 0)
    last, longest = np.zeros(200), np.zeros(200)
    for at, positions in enumerate(taken, start=1):
        longest[positions] = np.maximum(longest[positions], at - last[positions])
        last[positions] = at
    longest = np.maximum(longest, 40 * epoch - last)
    assert longest.max() <= 8 * epoch
    counts = np.bincount(np.concatenate(taken), minlength=200)
    assert counts[rates == 0].min() >= 5
    assert np.median(counts[(rates > 0) & (rates < 1)]) > 4 * np.median(counts[rates == 0])


def test_a_prompt_that_has_become_solvable_is_found_out() -> None:
    journal, epoch = Journal(), 40 // 4
    prompts = source("posterior", 40, 0, journal)
    coins = np.random.default_rng(0)
    rates = np.where(np.arange(40) < 10, 0.5, 0.0)
    counts = np.zeros((2, 40))
    for step in range(40 * epoch):
        later = step >= 20 * epoch
        if later:
            rates = np.where(np.arange(40) >= 30, 0.5, np.where(np.arange(40) < 10, 1.0, 0.0))  # 0..9 are learnt
        positions, _ = prompts.take(4)
        counts[int(later), positions] += 1
        journal.put(list(prompts.outcomes({p: (coins.random(S) < rates[p]).astype(float).tolist() for p in positions})))
    assert counts[0, :10].sum() > 0.6 * counts[0].sum()
    assert counts[1, 30:].sum() > 0.6 * counts[1].sum()


@pytest.mark.parametrize("selection", ["uniform", "posterior"])
def test_equal_seeds_choose_equally_and_others_do_not(selection: str) -> None:
    rates = rates_of(50, np.random.default_rng(0))
    first, again, other = (play(selection, rates, 30, seed)[1] for seed in (1, 1, 2))
    assert first == again != other


def test_uniform_takes_each_prompt_equally_often() -> None:
    _, taken = play("uniform", np.zeros(20), 2000, 0)
    counts = np.bincount(np.concatenate(taken), minlength=20)
    assert abs(counts / 2000 - 5 / 20).max() < 5 * np.sqrt(0.25 * 0.75 / 2000)
    assert all(len(set(positions)) == 5 for positions in taken)


class Clock:
    """Seconds, set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def chooser(
    path: Path, name: str, selection: str, count: int, clock: Clock, ends: ExitStack
) -> tuple[PromptSource, JournalWriter]:
    journal = ends.enter_context(JournalWriter(path, name, clock=clock))
    rng, prompts = np.random.default_rng(len(name)), prompts_of(count)

    def lease(order: object, wanted: int) -> list[int]:
        return journal.lease_first(order, wanted, 10.0)

    if selection == "uniform":
        return UniformPrompts(prompts, rng, lease), journal
    return PosteriorPrompts(prompts, rng, lease, journal.outcomes, PosteriorSettings()), journal


EVENTS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([0.0, 4.0, 11.0])), max_size=25)


@pytest.mark.parametrize("selection", ["uniform", "posterior"])
@settings(deadline=None, max_examples=10)
@given(EVENTS)
def test_no_two_searchers_answer_a_prompt_at_once_however_they_come_and_go(
    tmp_path_factory: pytest.TempPathFactory, selection: str, events: list[tuple[int, bool, float]]
) -> None:
    clock, path = Clock(), tmp_path_factory.mktemp("journal") / "j.sqlite"
    with ExitStack() as ends:
        three = [chooser(path, f"searcher-{i}", selection, 12, clock, ends) for i in range(3)]
        live: dict[int, tuple[int, float]] = {}  # position -> who has it, and until when
        for who, finishes, seconds in events:
            prompts, journal = three[who]
            positions, taken = prompts.take(4)
            held = {p for p, (_, end) in live.items() if end > clock.now}
            assert not held & set(positions)
            assert len(positions) == min(4, 12 - len(held))
            assert [int(p.text) for p in taken] == positions
            live |= dict.fromkeys(positions, (who, clock.now + 10.0))
            if finishes:
                mine = [p for p, (owner, _) in live.items() if owner == who]
                journal.put([], mine, outcomes=prompts.outcomes({p: [0.0, 1.0] for p in mine}))
                live = {p: of for p, of in live.items() if of[0] != who}
            clock.now += seconds


def test_who_is_late_does_not_give_back_what_another_has_taken_up(tmp_path: Path, ends: ExitStack) -> None:
    clock = Clock()
    late, other, third = (ends.enter_context(JournalWriter(tmp_path / "j", n, clock=clock)) for n in "abc")
    assert late.lease_first([2, 0], 2, 10.0) == [2, 0]
    assert other.lease_first([2, 0, 1], 3, 10.0) == [1]
    clock.now = 10.0
    assert other.lease_first([2, 1], 2, 10.0) == [2, 1]
    late.put([], [2, 0])
    assert third.lease_first([2, 1, 0], 3, 10.0) == [0]


def test_searchers_share_what_they_find_also_with_one_that_starts_later(tmp_path: Path, ends: ExitStack) -> None:
    clock, path = Clock(), tmp_path / "j.sqlite"
    first, journal = chooser(path, "a", "posterior", 30, clock, ends)
    for _ in range(40):
        positions, _ = first.take(3)
        journal.put([], positions, outcomes=first.outcomes({p: [float(p % 2)] * 8 for p in positions}))
    second, _ = chooser(path, "b", "posterior", 30, clock, ends)  # "a" and "b": equal generators from here on
    assert isinstance(first, PosteriorPrompts)
    assert isinstance(second, PosteriorPrompts)
    first.rng = np.random.default_rng(7)
    second.rng = np.random.default_rng(7)
    held, _ = first.take(3)
    journal.put([], held)
    assert second.take(3)[0] == held
    assert np.array_equal(first._posterior.parameters(), second._posterior.parameters())


def test_outcomes_are_told_once_in_the_transaction_of_their_trajectories(tmp_path: Path, ends: ExitStack) -> None:
    writer = ends.enter_context(JournalWriter(tmp_path / "j", "a"))
    writer.put([], outcomes=[(4, 1.5, 6.5), (2, 0.0, 8.0)])
    writer.put([], outcomes=[(4, 8.0, 0.0)])
    assert writer.outcomes(0) == [(1, 4, 1.5, 6.5), (2, 2, 0.0, 8.0), (3, 4, 8.0, 0.0)]
    assert writer.outcomes(2) == [(3, 4, 8.0, 0.0)]


def test_epochs_are_what_there_is_without_being_asked() -> None:
    assert PromptSettings().selection == "epochs"
