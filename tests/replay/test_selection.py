"""Which prompts and which of their trajectories: the paper's rules, and the defects its public code had."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_cases import prompt, store, trajectory

from tba.batch import collate
from tba.errors import UserError
from tba.replay.buffer import Buffer, BufferSettings, Tally
from tba.replay.codec import StoredTrajectory
from tba.replay.prompt_index import Listing
from tba.replay.selection import BatchRequest, Deck, RecencyReward, draw_by_reward, draw_uniform
from tba.types import Group, Version


def select(buffer: Buffer, groups: int, size: int, seed: int = 0, **settings: Any) -> tuple[list[Group], Counter[str]]:
    selector = RecencyReward(**settings).start()
    return selector.select(buffer, BatchRequest(groups, size), np.random.default_rng(seed)), selector.counts


def keys(groups: list[Group]) -> list[str]:
    return [group.prompt.key for group in groups]


SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda sizes: max(sizes) >= 2)


@settings(deadline=None, max_examples=150)
@given(
    sizes=SIZES,
    shares=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    groups=st.integers(1, 10),
    size=st.integers(2, 8),
    m=st.sampled_from([0.0, 0.5, 1.0]),
    inverse_temperature=st.sampled_from([0.0, 1.0, 1e3]),
    seed=st.integers(0, 2**31),
    mix=st.sampled_from(["chance", "batch", "group"]),
    disjoint=st.booleans(),
)
def test_every_batch_keeps_the_rules(
    sizes: list[int],
    shares: list[float],
    groups: int,
    size: int,
    m: float,
    inverse_temperature: float,
    seed: int,
    mix: str,
    disjoint: bool,
) -> None:
    recent = [int(share * n) for share, n in zip(shares, sizes, strict=False)]
    buffer = store(sizes, recent, rewards=[float(i % 3) for i in range(12)])
    more = {"mix": mix, "disjoint": disjoint}
    chosen, counts = select(buffer, groups, size, seed, m=m, inverse_temperature=inverse_temperature, **more)
    usable = {prompt(p).key: n for p, n in enumerate(sizes) if n >= 2}
    assert len(chosen) == groups
    for group in chosen:
        digests = [t.completion.digest for t in group.trajectories]
        assert len(set(digests)) == len(digests)  # no trajectory twice
        ours = sum(not t.imported for t in buffer.of(group.prompt.key))
        # ragged only where there is no more, or no more that is recent
        assert len(group) in (min(size, usable[group.prompt.key]), min(size, ours))
    # a prompt comes twice only once every prompt is there, in which case it is counted
    if groups <= len(usable):
        assert len(set(keys(chosen))) == groups
    else:
        assert set(keys(chosen)) == set(usable)
    assert counts["repeated"] == groups - len(set(keys(chosen)))
    assert counts["ragged"] == sum(len(g) < size for g in chosen)
    assert counts["recent"] + counts["reward"] == groups
    of_searchers = [n for n in recent if n >= 2]
    if of_searchers and groups <= len(of_searchers):  # else some are of prompts with nothing but answers from elsewhere
        if m == 1 or (m > 0 and mix == "group"):
            assert counts["reward"] == 0
        if mix == "batch":
            assert abs(counts["recent"] - m * groups) < 1


def test_recent_groups_are_of_the_newest_prompts_that_fill_one_and_of_their_newest_answers() -> None:
    buffer = store([10, 10, 10, 10], recent=[10, 4, 5, 3])
    for seed in range(20):
        chosen, counts = select(buffer, 2, 4, seed, m=1.0)
        assert keys(chosen) == [prompt(2).key, prompt(1).key]  # prompt 3 has only 3 that searchers brought
        # in this store the second token is 100 + the place in the order of arrival, which a group keeps
        assert [t.completion.tokens[1] for g in chosen for t in g.trajectories] == [106, 107, 108, 109] * 2
        assert counts["recent"] == counts["newest"] + 1 == 2  # 2 x 2 x 4 arrivals before: prompt 2, not prompt 1


def test_a_recent_group_is_ragged_before_its_prompt_comes_twice_and_old_only_where_all_else_is_from_elsewhere() -> None:
    buffer = store([6, 6, 6, 6], recent=[5, 0, 2, 6])
    chosen, counts = select(buffer, 6, 5, m=1.0)
    assert keys(chosen) == [*(prompt(p).key for p in (3, 0, 2, 1)), prompt(3).key, prompt(0).key]
    assert [len(g) for g in chosen] == [5, 5, 2, 5, 5, 5]
    assert dict(counts) == {"recent": 5, "reward": 1, "newest": 6, "ragged": 1, "repeated": 2}


def test_each_group_is_recent_with_probability_m() -> None:
    buffer = store([6] * 40)
    selector = RecencyReward(m=0.3).start()
    rng = np.random.default_rng(0)
    for _ in range(400):
        selector.select(buffer, BatchRequest(5, 4), rng)
    # 2000 draws of probability 0.3: five standard deviations are 0.051
    assert selector.counts["recent"] / 2000 == pytest.approx(0.3, abs=0.051)


def test_each_epoch_draws_every_prompt_exactly_once() -> None:
    buffer = store([4] * 12)
    selector = RecencyReward(m=0.0).start()
    rng = np.random.default_rng(1)
    everything = sorted(buffer.prompts())
    epochs = []
    for _ in range(3):
        drawn = [k for _ in range(4) for k in keys(selector.select(buffer, BatchRequest(3, 2), rng))]
        assert sorted(drawn) == everything
        epochs.append(drawn)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_prompt_that_arrives_joins_the_epoch_under_way() -> None:
    buffer = store([3] * 6)
    selector, rng = RecencyReward(m=0.0).start(), np.random.default_rng(2)
    drawn = keys(selector.select(buffer, BatchRequest(3, 2), rng))
    for tokens in ((1,), (2,), (3,)):
        buffer.add(trajectory(6, tokens))
    drawn += keys(selector.select(buffer, BatchRequest(4, 2), rng))
    assert sorted(drawn) == sorted(prompt(p).key for p in range(7))


def test_a_prompt_with_one_trajectory_waits_until_it_has_two() -> None:
    buffer = store([3, 1])
    assert set(keys(select(buffer, 2, 2)[0])) == {prompt(0).key}
    buffer.add(trajectory(1, (9, 9)))
    assert set(keys(select(buffer, 2, 2)[0])) == {prompt(0).key, prompt(1).key}


def test_a_store_of_one_prompt_gives_batches_of_it_in_both_halves() -> None:
    buffer = store([60], recent=[30])
    chosen, counts = select(buffer, 200, 20, m=0.5)
    assert len(chosen) == 200
    assert counts["repeated"] == 199
    assert 65 <= counts["recent"] <= 135  # a binomial(200, 1/2) within five standard deviations


def test_of_one_prompt_a_batch_takes_the_newest_answers_then_the_next_newest_each_as_often() -> None:
    buffer = store([60], recent=[30])
    chosen, _ = select(buffer, 5, 6, m=1.0)
    places = [t.completion.tokens[1] - 100 for g in chosen for t in g.trajectories]
    assert [sorted(places[i : i + 6]) for i in range(0, 30, 6)] == [list(range(i, i + 6)) for i in range(54, 29, -6)]
    again, _ = select(buffer, 10, 6, m=1.0)  # 60 of 30
    assert set(Counter(numbers(again)).values()) == {2}


def test_a_store_without_two_trajectories_of_a_prompt_has_no_group() -> None:
    with pytest.raises(ValueError, match="no prompt has 2 distinct trajectories"):
        select(store([1, 1, 0]), 1, 2)


def softmax_inclusion(logits: list[float], size: int) -> list[float]:
    """The chance of each index to be among `size` drawn in turn without replacement, by enumeration."""
    weights, chance = np.exp(logits), [0.0] * len(logits)
    for order in itertools.permutations(range(len(logits)), size):
        probability, left = 1.0, float(sum(weights))
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        for i in order:
            chance[i] += probability
    return chance


@pytest.mark.parametrize("size", [1, 2, 4])
def test_responses_are_drawn_by_softmax_of_reward_without_replacement(size: int) -> None:
    rewards, inverse_temperature, draws = [0.0, 0.5, 1.0, -1.0, 2.0], 1.5, 6000
    rng, counts = np.random.default_rng(3), np.zeros(5)
    for _ in range(draws):
        counts[draw_by_reward(np.array(rewards), inverse_temperature, size, rng)] += 1
    expected = np.array(softmax_inclusion([inverse_temperature * r for r in rewards], size))
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert np.all(np.abs(counts / draws - expected) <= 5 * deviation)


def test_inverse_temperature_zero_is_uniform_whatever_the_rewards() -> None:
    rng, counts, draws = np.random.default_rng(4), np.zeros(6), 6000
    for _ in range(draws):
        counts[draw_uniform(6, 2, rng)] += 1
    assert np.all(np.abs(counts / draws - 1 / 3) <= 5 * np.sqrt(2 / 9 / draws))
    buffer = store([6], rewards=[0, 0, 0, 0, 0, 1e9])
    best = sum(
        any(t.reward > 0 for t in select(buffer, 1, 2, seed, m=0.0, inverse_temperature=0.0)[0][0].trajectories)
        for seed in range(600)
    )
    assert best / 600 == pytest.approx(1 / 3, abs=5 * np.sqrt(2 / 9 / 600))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
    st.floats(0, 1e300, exclude_min=True),
    st.integers(1, 12),
    st.integers(0, 2**31),
)
def test_no_reward_and_no_temperature_is_too_extreme(
    rewards: list[float], inverse_temperature: float, size: int, seed: int
) -> None:
    chosen = draw_by_reward(np.array(rewards), inverse_temperature, size, np.random.default_rng(seed))
    assert len(set(chosen)) == len(chosen) == min(size, len(rewards))
    assert set(chosen) <= set(range(len(rewards)))


def test_at_a_large_inverse_temperature_the_best_are_taken_and_equals_are_taken_evenly() -> None:
    rewards, rng, counts = np.array([5.0, 1.0, 1.0, 1.0, 1.0, 0.0]), np.random.default_rng(5), np.zeros(6)
    for _ in range(2000):
        counts[draw_by_reward(rewards, 1e300, 3, rng)] += 1
    assert counts[0] == 2000
    assert counts[5] == 0
    assert np.all(np.abs(counts[1:5] / 2000 - 0.5) <= 5 * np.sqrt(0.25 / 2000))


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match=r"--replay\.selection\.m is 1\.5"):
        RecencyReward(m=1.5)
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"--replay\.selection\.inverse-temperature"):
            RecencyReward(inverse_temperature=bad)


def numbers(groups: Sequence[Group]) -> list[str]:
    return [t.uid for g in groups for t in g.trajectories]


def recent_ones(group: Group) -> int:
    return sum(t.version == Version(0, 10) for t in group.trajectories)


@pytest.mark.parametrize("m", [0.5, 0.25, 1.0, 0.0])
def test_a_share_of_each_batch_is_recent_where_that_is_asked(m: float) -> None:
    buffer = store([6] * 20)
    selector, rng = RecencyReward(m=m, mix="batch").start(), np.random.default_rng(0)
    for batches in range(1, 40):
        selector.select(buffer, BatchRequest(8, 4), rng)
        assert selector.counts["recent"] == round(8 * m) * batches  # exactly, not on average
    drawn = []
    for _ in range(300):
        before = selector.counts["recent"]
        selector.select(buffer, BatchRequest(3, 4), rng)
        drawn.append(selector.counts["recent"] - before)
    assert set(drawn) <= {math.floor(3 * m), math.ceil(3 * m)}  # next to what cannot be exact
    assert np.mean(drawn) == pytest.approx(3 * m, abs=5 * 0.5 / np.sqrt(300))


@pytest.mark.parametrize("inverse_temperature", [0.0, 3.0])
def test_a_share_of_each_group_is_recent_where_that_is_asked_and_no_trajectory_is_in_it_twice(
    inverse_temperature: float,
) -> None:
    buffer = store([40, 40], recent=[20, 20], rewards=[40.0 - i for i in range(40)])  # the recent ones are the worse
    chosen, counts = select(buffer, 300, 10, m=0.4, mix="group", inverse_temperature=inverse_temperature)
    assert dict(counts) == {"recent": 300, "reward": 0, "newest": 300, "ragged": 0, "repeated": 298}
    assert all(len(group) == len(set(numbers([group]))) == 10 for group in chosen)
    # the other six are a draw from all that are left: of 36, 16 recent; by reward the old ones, which are the better
    others = [recent_ones(group) - 4 for group in chosen]
    assert min(others) >= 0
    if inverse_temperature == 0:
        assert np.mean(others) == pytest.approx(6 * 16 / 36, abs=5 * 1.2 / np.sqrt(300))
    else:
        assert np.mean(others) < 0.01


def test_the_part_of_a_group_that_goes_by_reward_is_the_softmax_over_what_the_other_part_left() -> None:
    rewards, draws = [0.0, 0.5, 1.0, -1.0, 2.0], 1200
    buffer = store([5], recent=[2], rewards=rewards)  # the newest of the last two, then two of the other four
    selector, rng = RecencyReward(m=1 / 3, mix="group", inverse_temperature=1.5).start(), np.random.default_rng(0)
    chosen = [selector.select(buffer, BatchRequest(1, 3), rng)[0] for _ in range(draws)]
    assert selector.counts["recent"] == draws
    expected = np.append(softmax_inclusion([1.5 * reward for reward in rewards[:4]], 2), 1.0)
    drawn = Counter(t.reward for group in chosen for t in group.trajectories)
    found = np.array([drawn[r] for r in rewards]) / draws
    assert np.all(np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws))


@pytest.mark.parametrize("mix", ["chance", "batch", "group"])
def test_groups_of_one_prompt_in_one_batch_share_nothing_where_that_is_asked_and_there_are_enough(mix: str) -> None:
    buffer = store([60], recent=[30], rewards=[float(i % 7) for i in range(60)])
    selector = RecencyReward(m=0.5, inverse_temperature=0.5, mix=mix, disjoint=True).start()
    rng = np.random.default_rng(0)
    for _ in range(20):
        chosen = selector.select(buffer, BatchRequest(5, 6), rng)
        assert len(set(numbers(chosen))) == 30
        assert {len(g) for g in chosen} == {6}
    chosen = selector.select(buffer, BatchRequest(20, 6), rng)  # 120 of 60: some come twice, none twice in a group
    assert all(len(g) == len(set(numbers([g]))) == 6 for g in chosen)
    shared, _ = select(store([60], recent=[30]), 5, 6, m=0.5)
    assert len(set(numbers(shared))) < 30  # by default each group is a draw of its own


def test_of_a_single_prompt_all_trajectories_are_weighed_by_their_reward_at_once() -> None:
    chosen, counts = select(
        store([400], rewards=[float(i % 4) for i in range(400)]), 1200, 2, m=0.0, inverse_temperature=1.0
    )
    assert counts["reward"] == 1200
    weights = np.exp(np.arange(4.0))
    share = np.bincount([int(t.reward) for g in chosen for t in g.trajectories], minlength=4) / 2400
    assert np.abs(share - weights / weights.sum()).max() < 0.04


@pytest.mark.parametrize("mix", ["chance", "group"])
def test_a_group_says_whether_its_answers_come_as_often_as_they_were_sampled(mix: str) -> None:
    buffer = Buffer(BufferSettings())
    for i in range(2000):
        buffer.add(trajectory(2 + i % 10, (i,)))
    for i in range(8):
        buffer.add(trajectory(i % 2, (i,), reward=float(i)))
    for m in (1.0, 0.0, 0.5):
        groups, _ = select(buffer, 2, 4, mix=mix, m=m)
        assert [g.as_sampled for g in groups] == [True, True]
    drawn_by_reward, _ = select(buffer, 2, 3, m=0.0, inverse_temperature=1.0, mix=mix)
    assert [g.as_sampled for g in drawn_by_reward] == [False, False]
    buffer.add(trajectory(1, (3,), version=1))  # a copy of one that was there: it stays, in the other's place
    groups, _ = select(buffer, 2, 4, m=1.0, mix=mix)
    assert {g.prompt.key: g.as_sampled for g in groups} == {prompt(0).key: True, prompt(1).key: False}
    batch = collate(groups)
    assert batch.as_sampled_G is not None
    assert batch.as_sampled_G.tolist() == [g.as_sampled for g in groups]
    for _ in range(2):  # more than one answer in a thousand was left out
        buffer.add(trajectory(1, (3,), version=1))
    assert not any(g.as_sampled for g in select(buffer, 2, 4, m=1.0, mix=mix)[0])
    part = batch.select((batch.group_B == 1).nonzero()[:, 0])
    assert part.as_sampled_G is not None
    assert part.as_sampled_G.tolist() == [groups[1].as_sampled]


def test_repeats_that_the_journal_has_deleted_still_count_after_a_resume() -> None:
    whole, rebuilt = Buffer(BufferSettings()), Buffer(BufferSettings())
    for _ in range(5):
        whole.add(trajectory(0, (0,)))
    for i in range(95):
        whole.add(trajectory(1, (i,)))
        if i >= 55:  # what came before has left the source
            rebuilt.add(StoredTrajectory.of(trajectory(1, (i,)))._replace(place=6 + i))
    rebuilt.pass_over(Tally(60, 60), Tally())
    assert not rebuilt.thinned(prompt(1).key)
    rebuilt.carry(whole.counts(), whole.fates().clip(min=0))
    assert (rebuilt.received, rebuilt.counts().duplicate) == (100, whole.counts().duplicate)
    assert whole.thinned(prompt(1).key)
    assert rebuilt.thinned(prompt(1).key)


def test_keeping_repeats_keeps_groups_as_sampled_and_evicting_the_lowest_reward_does_not() -> None:
    for kept, as_sampled in ((BufferSettings(deduplicate=False), True), (BufferSettings(per_prompt=3), True),
                             (BufferSettings(per_prompt=3, evict="lowest_reward"), False),
                             (BufferSettings(total=3, evict="lowest_reward"), False)):  # fmt: skip
        buffer = Buffer(kept)
        for i in range(4):
            buffer.add(trajectory(0, (i if kept.deduplicate else 0,), reward=float(i)))
        (group,), _ = select(buffer, 1, 2, m=1.0)
        assert group.as_sampled is as_sampled


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_groups_without_signal_are_passed_over_while_there_are_others_where_that_is_asked(m: float) -> None:
    buffer, varied = store([0] * 40), {prompt(p).key for p in range(0, 40, 4)}
    for p in range(40):
        for i in range(4):
            buffer.add(trajectory(p, (1, i), version=10, reward=float(p % 4 == 0 and i % 2)))
    chosen, counts = select(buffer, 10, 4, m=m, refill=True)
    assert set(keys(chosen)) == varied
    assert not any(group.as_sampled for group in chosen)  # by their rewards they are here
    assert 0 < counts["passed_over"] <= 30
    chosen, counts = select(buffer, 14, 4, m=m, refill=True)  # there are no more: the first drawn in their places
    assert set(keys(chosen)) > varied
    assert len(set(keys(chosen))) == len(chosen)
    assert counts["passed_over"] == 40 - 14
    plain, counts = select(buffer, 10, 4, m=m)
    assert set(keys(plain)) != varied
    assert "passed_over" not in counts


@pytest.mark.parametrize("answers", [4, 3])
def test_groups_without_signal_are_passed_over_once_also_where_they_are_ragged(answers: int) -> None:
    buffer, rng = Buffer(BufferSettings()), np.random.default_rng(0)
    for p in range(100):  # those with signal are older
        for i in range(answers):
            buffer.add(trajectory(p, (1, i), version=10, reward=float(p < 20 and i % 2)))
    selector = RecencyReward(m=1.0, refill=True).start()
    found = []
    for _ in range(5):
        chosen = selector.select(buffer, BatchRequest(4, 4, 400), rng)
        buffer.use([t for group in chosen for t in group.trajectories])
        found.append(sum(len({t.reward for t in group.trajectories}) > 1 for group in chosen))
    assert found[2:] == [4, 4, 4]


@pytest.mark.parametrize("sync_every", [1, 16])
def test_what_was_passed_over_comes_after_all_others_until_something_new_of_it_arrives(sync_every: int) -> None:
    """However many batches count as recent, those passed over do not pile up before what can be learnt from."""
    buffer, rng = store([0] * 160), np.random.default_rng(0)
    selector = RecencyReward(m=0.95, refill=True).start()
    without_signal = []
    for step in range(40):
        for p in range(4 * step, 4 * step + 4):  # two of four have none
            for i in range(4):
                buffer.add(trajectory(p, (1, i), version=10, reward=float(p % 2 and i % 2)))
        if step == 20:  # a resumed run draws the same
            state = json.loads(json.dumps(selector.state()))
            selector = RecencyReward(m=0.95, refill=True).start()
            selector.restore(state)
        chosen = selector.select(buffer, BatchRequest(4, 4, 16, sync_every), rng)
        buffer.use([t for group in chosen for t in group.trajectories])
        without_signal += [len({t.reward for t in group.trajectories}) == 1 for group in chosen]
    assert sum(without_signal[8:]) == 0  # the first two batches have no others
    again = next(iter(selector.state()["passed"]))
    number = next(p for p in range(160) if prompt(p).key == again)
    for i in range(4):
        buffer.add(trajectory(number, (2, i), version=11, reward=float(i % 2)))
    assert again in keys(selector.select(buffer, BatchRequest(4, 4, 16, sync_every), rng))


def test_no_more_than_ten_groups_without_signal_are_passed_over_for_one_of_a_batch() -> None:
    buffer = store([2] * 100)  # of equal rewards
    buffer.add(trajectory(100, (1, 1), version=10, reward=0.0))
    buffer.add(trajectory(100, (1, 2), version=10, reward=1.0))
    drawn = [select(buffer, 1, 2, seed, m=0.0, refill=True)[0][0] for seed in range(200)]
    found = sum(len({t.reward for t in group.trajectories}) > 1 for group in drawn)
    assert abs(found / 200 - 11 / 101) < 4 * math.sqrt(11 / 101 * 90 / 101 / 200)


def test_what_is_not_kept_any_longer_is_drawn_as_recent_and_never_by_reward() -> None:
    buffer = Buffer(BufferSettings(per_prompt=4, evict="lowest_reward", keep_recent=True))
    for i in range(12):
        buffer.add(trajectory(0, (i,), reward=float(-i), uid=str(i)))
    (recent,), _ = select(buffer, 1, 12, m=1.0)
    assert sorted(map(int, numbers([recent]))) == list(range(12))
    (kept,), _ = select(buffer, 1, 12, m=0.0)
    assert sorted(map(int, numbers([kept]))) == [0, 1, 2, 3]
    (both,), _ = select(buffer, 1, 11, m=0.5, mix="group")  # 6 recent, of all 12; 4 are kept: the rest is recent too
    assert len(both) == len(set(numbers([both]))) == 11


def permutation(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(6).permutation(rows))


# Defects of the method's public code, which must not come back.


def test_defect_1_rows_say_which_prompt_they_belong_to_so_no_layout_is_assumed() -> None:
    buffer = store([5, 3, 5], rewards=[0.0, 1.0, 2.0, 3.0, 4.0])
    chosen, _ = select(buffer, 3, 4, m=0.0)
    batch = collate(chosen)
    shuffled = batch.select(permutation(batch.rows))
    for g, group in enumerate(chosen):
        mean = np.mean([t.reward for t in group.trajectories])
        assert shuffled.reward_B[shuffled.group_B == g].mean().item() == pytest.approx(mean)


def test_defect_2_rewards_go_with_their_rows_in_any_slice_of_a_batch() -> None:
    buffer = store([6, 6], rewards=[float(i) for i in range(6)])
    chosen, _ = select(buffer, 2, 5, m=0.0)
    batch = collate(chosen)
    part = batch.select(permutation(batch.rows)[:4])
    # in this store the second token is 100 + the reward
    assert (part.completion_BT[:, 1] - 100).tolist() == part.reward_B.tolist()


def test_defect_3_what_is_recent_does_not_depend_on_how_often_data_was_taken_in() -> None:
    chosen = []
    for moves in (0, 1):  # the trainer's version stands still, or moves on with each arrival
        buffer = Buffer(BufferSettings())
        for arrival in range(10):
            buffer.now = Version(0, moves * arrival)
            buffer.add(trajectory(0, (arrival,), version=0, uid=str(arrival)))
        chosen.append(numbers(select(buffer, 1, 4, m=1.0)[0]))
    assert chosen == [["6", "7", "8", "9"]] * 2


def test_defect_4_duplicates_and_what_capacity_cut_do_not_count_as_recent() -> None:
    buffer = Buffer(BufferSettings(per_prompt=5))
    for tokens in [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (7,), (8,)]:
        buffer.add(trajectory(0, tokens))
    assert buffer.newest_prompts(5, 10, 1) == [prompt(0).key]
    assert buffer.newest_prompts(6, 10, 1) == []
    (group,), counts = select(buffer, 1, 6, m=1.0)
    assert [tuple(t.completion.tokens) for t in group.trajectories] == [(4,), (5,), (6,), (7,), (8,)]
    assert (counts["recent"], counts["ragged"]) == (1, 1)  # only five are distinct: a ragged group, nothing twice


def test_defect_5_a_softmax_that_underflows_still_gives_a_full_group() -> None:
    buffer = store([12], rewards=[-(10.0**i) for i in range(12)])
    (group,), _ = select(buffer, 1, 10, m=0.0, inverse_temperature=1e6)
    # ten of twelve, and the two that are infinitely less likely than the rest are left out
    assert sorted(t.reward for t in group.trajectories) == sorted(-(10.0**i) for i in range(10))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=80), st.integers(0, 2**31))
def test_while_prompts_come_and_go_no_epoch_draws_one_twice_and_none_is_forgotten(
    changes: list[tuple[int, bool]], seed: int
) -> None:
    deck, rng, listing = Deck(), np.random.default_rng(seed), Listing()
    drawn: set[str] = set()
    for number, draws in changes:
        key = str(number)
        if draws:
            got = deck.draw(listing, (), rng)
            assert (got is None) == (len(listing) == 0)
            if got is not None:
                assert got in listing
                if got in drawn:  # a new epoch: there was nothing left
                    assert set(listing) <= drawn
                    drawn = set()
                drawn.add(got)
        elif key in listing:
            listing.remove(key)
        else:
            listing.add(key)
    # all that are there and not drawn yet come before any other comes again
    left = set(listing) - drawn
    assert {deck.draw(listing, (), rng) for _ in left} == left


@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_that_left_before_its_turn_and_came_back_still_has_its_turn(seed: int) -> None:
    deck, listing, rng = Deck(), Listing(), np.random.default_rng(seed)
    for key in "abc":
        listing.add(key)
    deck.refresh(listing)
    listing.remove("a")
    assert {deck.draw(listing, (), rng) for _ in range(2)} == {"b", "c"}
    listing.add("a")
    assert deck.draw(listing, (), rng) == "a"


def test_draws_do_not_depend_on_the_process_or_on_the_order_of_arrival() -> None:
    code = (
        "import numpy as np\n"
        "from tba.replay.prompt_index import Listing\n"
        "from tba.replay.selection import Deck\n"
        "deck, listing, rng = Deck(), Listing(), np.random.default_rng(0)\n"
        "for i in range(50)[::%d]:\n"
        "    listing.add(f'prompt {i}')\n"
        "print([deck.draw(listing, (), rng) for _ in range(120)])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code % step],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed, step in ((1, 1), (2, -1))
    }
    assert len(printed) == 1


def test_each_prompt_is_equally_likely_to_come_first_also_when_it_arrived_late() -> None:
    counts: Counter[str | None] = Counter()
    rng = np.random.default_rng(7)
    for _ in range(3000):
        deck, listing = Deck(), Listing()
        for number in range(4):
            listing.add(str(number))
        deck.draw(listing, ("0", "1", "2"), rng)  # draws 3
        listing.add("late")
        counts[deck.draw(listing, (), rng)] += 1
    assert set(counts) == {"0", "1", "2", "late"}
    assert all(abs(n / 3000 - 0.25) <= 5 * np.sqrt(0.1875 / 3000) for n in counts.values())


def test_an_epoch_of_endlessly_new_prompts_does_not_grow_without_bound() -> None:
    deck, listing, rng = Deck(), Listing(), np.random.default_rng(8)
    for number in range(20_000):
        listing.add(str(number))
        if number >= 10:
            listing.remove(str(number - 10))
        if number % 4 == 0:
            assert deck.draw(listing, (), rng) in listing
    state = deck.state()
    assert len(state["undrawn"]) + len(state["drawn"]) <= 1200
