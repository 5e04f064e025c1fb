"""Replay as the trainer sees it: when a batch may be sampled, what it counts, how it resumes."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trajectory_cases import Pile, prompt, same, trajectory

from tba.apps.red_team.near import NearDuplicates
from tba.errors import UserError
from tba.replay.buffer import Buffer, BufferSettings
from tba.replay.codec import StoredTrajectory, pack_uses, unpack_uses
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.pacing import Pacing
from tba.replay.replay import Replay, ReplaySettings
from tba.replay.selection import BatchRequest, RecencyReward
from tba.types import Group, Score, Trajectory, Version


def rows(prompts: Sequence[int], each: int, version: int = 0, first: int = 0) -> list[Trajectory]:
    return [trajectory(p, (p, first + i), version, reward=float(i)) for p in prompts for i in range(each)]


def settings_of(warm_up: int = 0, max_mean_uses: float = 8.0, **rest: object) -> ReplaySettings:
    return replace(ReplaySettings(pacing=Pacing(warm_up, max_mean_uses)), **rest)


def uids(groups: list[Group]) -> list[str]:
    return [t.uid for g in groups for t in g.trajectories]


def assert_closes(ledger: dict[str, int]) -> None:
    for unit in ("trajectories", "tokens"):
        parts = sum(ledger[f"{term}_{unit}"] for term in ("trained_once", "waiting", "evicted", "duplicate"))
        assert ledger[f"received_{unit}"] == parts


def test_a_batch_may_be_sampled_after_the_warm_up_and_until_reuse_reaches_its_limit() -> None:
    pile = Pile()
    replay = Replay(pile, settings_of(warm_up=8, max_mean_uses=2.0))
    assert replay.ready(2, 4) == "warm_up"
    pile.waiting += rows([0], 7)
    assert replay.ready(2, 4) == "warm_up"
    pile.waiting += rows([1], 7)
    for uses in (8, 16, 24):
        assert replay.ready(2, 4) is None
        replay.sample(2, 4)
        assert replay.samples_per_insert == uses / 14
    assert replay.ready(2, 4) == "paced"  # 32 uses of 14 trajectories would be more than 2 each
    with pytest.raises(RuntimeError, match=r"no batch may be sampled now \(paced\)"):
        replay.sample(2, 4)
    pile.waiting += rows([2], 2)
    assert replay.ready(2, 4) is None


def test_without_two_trajectories_of_a_prompt_there_is_nothing_to_sample() -> None:
    pile = Pile()
    replay = Replay(pile, settings_of())
    assert replay.ready(1, 2) == "empty"
    pile.waiting += rows([0, 1, 2], 1)
    assert replay.ready(1, 2) == "empty"
    pile.waiting += rows([0], 1, first=5)
    assert replay.ready(1, 2) is None
    assert {g.prompt.key for g in replay.sample(1, 2)} == {prompt(0).key}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=30),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.integers(4, 30),
)
def test_mean_uses_never_exceed_the_limit_and_the_ledger_closes_at_every_moment(
    turns: list[tuple[int, int]], max_mean_uses: float, total: int
) -> None:
    pile = Pile()
    replay = Replay(pile, settings_of(max_mean_uses=max_mean_uses, buffer=BufferSettings(4, total)))
    used: Counter[str] = Counter()
    received = 0
    for step, (p, count) in enumerate(turns):
        pile.waiting += rows([p], count, step)
        received += count
        replay.now = Version(0, step)
        if replay.ready(2, 3) is None:
            used.update(uids(replay.sample(2, 3)))
        ledger = replay.ledger()
        assert_closes(ledger)
        assert ledger["received_trajectories"] == received
        assert ledger["trained_once_trajectories"] == len(used)
        assert ledger["trained_total_trajectories"] == used.total() <= max_mean_uses * received
        assert ledger["trained_total_tokens"] == 2 * used.total()


def test_new_data_comes_in_at_once_or_only_at_syncs() -> None:
    for ingest, taken in (("always", 12), ("sync", 6)):
        pile = Pile()
        replay = Replay(pile, settings_of(ingest=ingest))
        pile.waiting += rows([0], 6)
        assert replay.ready(1, 2) is None
        pile.waiting += rows([1], 6)
        assert replay.ready(1, 2) is None
        assert replay.ledger()["received_trajectories"] == taken
        replay.drain()
        assert replay.ledger()["received_trajectories"] == 12


def test_a_trainer_that_is_held_back_takes_new_data_in_whatever_the_setting() -> None:
    pile = Pile()
    replay = Replay(pile, settings_of(warm_up=4, max_mean_uses=1.0, ingest="sync"))
    pile.waiting += rows([0], 4)
    assert replay.ready(1, 4) is None
    replay.sample(1, 4)
    assert replay.ready(1, 4) == "paced"
    pile.waiting += rows([1], 4)
    assert replay.ready(1, 4) is None


def test_a_batch_that_was_fetched_ahead_is_taken_back_though_it_holds_what_is_not_kept_any_longer() -> None:
    """The reference is reset while it waits; only the next look for a batch lets it leave."""
    pile = Pile()
    replay = Replay(pile, replace(ANCESTOR, selection=RecencyReward(m=1.0)))
    pile.waiting += [trajectory(0, (i, i + 20, i + 40), reward=-i, uid=str(i)) for i in range(9)]
    assert replay.ready(1, 9) is None
    ahead = replay.sample(1, 9)
    assert sorted(map(int, uids(ahead))) == list(range(9))
    replay.reference = LATER
    replay.take_back(ahead)
    ledger = replay.ledger()
    assert (ledger["waiting_trajectories"], ledger["trained_total_trajectories"]) == (9, 0)
    replay.now = Version(0, 3)
    ledger = replay.ledger()
    assert_closes(ledger)
    assert ledger["waiting_trajectories"] == 4


@pytest.mark.parametrize("slower", [1, 5])
@pytest.mark.parametrize("ingest", ["always", "sync"])
def test_however_long_a_round_takes_the_share_m_of_the_groups_is_of_the_newest_arrivals(
    slower: int, ingest: str
) -> None:
    """Rounds of 8 prompts that take 5 x `slower` updates, and were sampled by the weights at their beginning; k = 2."""
    pile, k, m, groups, size = Pile(), 2, 0.75, 2, 4
    chosen = settings_of(selection=RecencyReward(m=m), max_mean_uses=math.inf, ingest=ingest)
    replay = Replay(pile, chosen, k)
    steps, length, ages = 600, 5 * slower, []
    for step in range(steps):
        replay.now = Version(0, step)
        if step % length == 0:
            first = 8 * (step // length) % 64  # 64 prompts, epoch by epoch
            sampled = max(0, step - length)
            pile.waiting += [trajectory(first + p, (step, i), sampled) for p in range(8) for i in range(size)]
        if step % k == 0:
            replay.drain()
        assert replay.ready(groups, size) is None
        ages += [step - t.version.step for g in replay.sample(groups, size) for t in g.trajectories]
    counts = replay.selector.counts
    assert counts["recent"] / (groups * steps) == pytest.approx(m, abs=5 * math.sqrt(m * (1 - m) / (groups * steps)))
    assert counts["newest"] >= 0.9 * counts["recent"]
    # what is recent is one or two rounds old; the others are a draw from all that is in memory
    assert np.quantile(ages, 0.9 * m) <= 2 * length


class Oldest:
    """A selection of somebody's own, which draws the oldest answers and keeps what it was asked."""

    def __init__(self) -> None:
        self.counts = {"oldest": 0}
        self.asked: list[BatchRequest] = []

    def start(self) -> Oldest:
        return self

    def select(self, store: Buffer, request: BatchRequest, rng: np.random.Generator) -> list[Group]:
        self.asked.append(request)
        self.counts["oldest"] += request.groups
        return [Group(tuple(store.of(p)[: request.size])) for p in sorted(store.prompts(2))[: request.groups]]

    def state(self) -> int:
        return self.counts["oldest"]

    def restore(self, state: int) -> None:
        self.counts = {"oldest": state}


def test_any_selection_is_told_k_the_last_arrivals_and_the_share_that_the_controller_asks_for() -> None:
    pile, own = Pile([trajectory(p, (i,)) for p in range(2) for i in range(3)]), Oldest()
    replay = Replay(pile, settings_of(selection=own), 3)
    assert replay.ready(2, 2) is None
    first = replay.sample(2, 2)
    assert [t.completion.tokens.tolist() for g in first for t in g.trajectories] == [[0], [1]] * 2
    pile.waiting = [trajectory(0, (9,))]
    assert replay.ready(2, 4) is None
    replay.steer(0.25, 6)
    assert sorted(len(group) for group in replay.sample(2, 4)) == [3, 4]
    assert own.asked == [BatchRequest(2, 2, 6, 3), BatchRequest(2, 4, 1, 6, 0.25)]
    assert replay.metrics()["groups_oldest"] == 4
    again = Replay(Pile(), settings_of(selection=Oldest()))
    again.restore(json.loads(json.dumps(replay.state())))
    assert again.metrics()["groups_oldest"] == 4


def test_only_the_current_reference_is_sampled_and_the_others_wait() -> None:
    pile = Pile()
    replay = Replay(pile, settings_of())
    later = Version(0, 50)
    pile.waiting += rows([0], 8) + [replace(t, reference=later) for t in rows([0], 8, first=8)]
    assert replay.ready(1, 8) is None
    assert {g.reference for g in replay.sample(1, 8)} == {Version()}
    replay.reference = later
    (group,) = replay.sample(1, 8)
    assert {t.reference for t in group.trajectories} == {later}
    assert replay.ledger()["waiting_trajectories"] == 0


LATER = Version(0, 50)


def scores_of(trajectories: Sequence[Trajectory], reference: Version = LATER) -> list[Score]:
    return [Score(t.uid, reference, np.full(t.length, -0.5, dtype=np.float32)) for t in trajectories]


def test_after_a_reset_a_batch_waits_for_scores_of_as_many_as_the_warm_up_wants_or_of_all(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "j", "searcher-0") as searcher, JournalFollower(tmp_path / "j") as follower:
        replay = Replay(follower, settings_of(warm_up=6, max_mean_uses=100.0))
        searcher.put(rows([0, 1], 6))
        assert replay.ready(2, 2) is None
        used = {uid for _ in range(9) for uid in uids(replay.sample(2, 2))}
        replay.reference = LATER
        assert replay.ready(2, 2) == "unscored"
        searcher.put(late := rows([0], 1, first=9))  # by a searcher that has not seen the reset
        assert replay.ready(2, 2) == "unscored"
        wanted = searcher.unscored(LATER, 5, 60.0)
        assert wanted[0].uid == late[0].uid
        searcher.put_scores(scores_of(wanted))
        assert replay.ready(2, 2) == "unscored"
        searcher.put_scores(scores_of(searcher.unscored(LATER, 1, 60.0)))
        assert replay.ready(2, 2) is None
        assert replay.metrics()["replay_unscored"] == 13 - 6
        assert {g.reference for g in replay.sample(2, 2)} == {LATER}
        assert replay.ready(4, 2) == "unscored"  # a batch has more than the warm-up
        searcher.put_scores(scores_of(searcher.unscored(LATER, 99, 60.0)))
        assert replay.ready(40, 2) is None
        ledger = replay.ledger()
        assert_closes(ledger)
        assert ledger["trained_once_trajectories"] >= len(used)
        assert ledger["received_trajectories"] == 13
        assert replay.references == {LATER}


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 8), st.booleans()), min_size=4, max_size=14)
)
def test_through_any_resets_groups_are_of_one_reference_and_what_was_trained_is_counted_once(
    turns: list[tuple[int, int, int, bool]],
) -> None:
    """Each turn: a prompt and how many answers come to it, how many are scored, and whether the reference is reset."""
    used: Counter[str] = Counter()
    searching = Version()  # the reference of a searcher that sees each reset one turn late
    chosen = settings_of(buffer=BufferSettings(5, 12), max_mean_uses=50.0)
    with (
        TemporaryDirectory() as folder,
        JournalWriter(Path(folder) / "j", "s") as searcher,
        JournalFollower(Path(folder) / "j") as follower,
    ):
        replay = Replay(follower, chosen)
        for step, (p, count, scored, reset) in enumerate(turns, start=1):
            searcher.put([replace(t, reference=searching) for t in rows([p], count, step, first=step % 3)])
            searcher.put_scores(scores_of(searcher.unscored(searching, scored, 60.0), searching))
            searching = replay.reference
            if reset:
                replay.reference = Version(0, step)
            if replay.ready(2, 3) is None:
                groups = replay.sample(2, 3)
                assert {g.reference for g in groups} == {replay.reference}
                assert {t.reference for g in groups for t in g.trajectories} == {replay.reference}
                used.update(uids(groups))
            ledger = replay.ledger()
            assert_closes(ledger)
            assert ledger["trained_once_trajectories"] == len(used)
            assert ledger["trained_total_trajectories"] == used.total()
        assert ledger["received_trajectories"] == sum(count for _, count, _, _ in turns)


def test_equal_seeds_sample_equally_and_others_do_not() -> None:
    def run(seed: int) -> list[list[str]]:
        pile = Pile()
        pile.waiting = data.copy()
        replay = Replay(pile, settings_of(), seed=seed)
        assert replay.ready(3, 4) is None
        return [uids(replay.sample(3, 4)) for _ in range(5)]

    data = rows(range(8), 9)
    assert run(1) == run(1) != run(2)


def test_one_thread_may_sample_while_another_asks_for_the_ledger() -> None:
    pile = Pile()
    replay = Replay(pile, settings_of(max_mean_uses=1e9))
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            while not stop.is_set():
                assert_closes(replay.ledger())
        except AssertionError as error:
            failures.append(error)

    stop = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in range(60):
        pile.waiting += rows([step % 5], 20, step)
        replay.now = Version(0, step)
        assert replay.ready(3, 8) is None
        replay.sample(3, 8)
    stop.set()
    watcher.join(60)
    assert failures == []


def used_by_uid(replay: Replay, there: Sequence[Trajectory]) -> Counter[str]:
    """What the record says of each; the places of a pile are the order in which it was taken in."""
    used = replay.buffer.fates().clip(min=0)
    assert used[0] == 0
    return Counter({t.uid: int(n) for t, n in zip(there, used[1:], strict=True) if n})


def test_every_use_is_on_record() -> None:
    pile, there = Pile(), rows(range(3), 6)
    pile.waiting += there
    replay = Replay(pile, settings_of())
    assert replay.ready(2, 4) is None
    used = Counter(uid for _ in range(10) for uid in uids(replay.sample(2, 4)))
    assert used_by_uid(replay, there) == used


def test_a_batch_that_was_fetched_ahead_and_not_trained_leaves_no_use_behind() -> None:
    pile, there = Pile(), rows(range(3), 6)
    pile.waiting += there
    replay = Replay(pile, settings_of())
    assert replay.ready(2, 4) is None
    trained = replay.sample(2, 4)
    before = replay.ledger()
    ahead = replay.sample(2, 4)
    assert replay.ledger() != before
    replay.take_back(ahead)
    assert replay.ledger() == before
    assert used_by_uid(replay, there) == Counter(uids(trained))


@given(st.lists(st.integers(-2, 2**31 - 1), max_size=50))
def test_a_record_of_uses_is_read_as_it_was_written(used: list[int]) -> None:
    assert unpack_uses(pack_uses(np.array(used, dtype=np.int32))).tolist() == used


@pytest.mark.parametrize("text", ["", "no", "eJw=", pack_uses(np.ones(9, dtype=np.int32))[:-8], "\u20ac", 3, None])
def test_what_is_no_record_of_uses_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="the record of uses"):
        unpack_uses(text)


class SteppedFollower(JournalFollower):
    """Sees no further than `until`, as if what comes after had not been put yet."""

    until: int | None = None

    def drain_stored(self, limit: int | None = None, until: int | None = None) -> list[StoredTrajectory]:
        return super().drain_stored(limit, self.until if until is None else until)


PLAIN = settings_of(
    max_mean_uses=3.0, selection=RecencyReward(m=0.5, inverse_temperature=1.0), buffer=BufferSettings(6, 30)
)
ANCESTOR = settings_of(
    max_mean_uses=3.0,
    selection=RecencyReward(m=0.5, inverse_temperature=1.0, mix="group", disjoint=True),
    buffer=BufferSettings(
        4, 12, deduplicate=False, near_duplicates=NearDuplicates("edit", 0.25), evict="lowest_reward", keep_recent=True
    ),
)


class Run:
    """One trainer's replay on its own journal, driven by a script."""

    def __init__(self, folder: Path, seed: int, chosen: ReplaySettings | None = None) -> None:
        self.folder, self.seed, self.chosen = folder, seed, chosen or PLAIN
        self.sampled: list[list[str]] = []
        self.open()

    def open(self) -> None:
        self.writer = JournalWriter(self.folder / "journal", "searcher-0")
        self.follower = SteppedFollower(self.folder / "journal")
        self.replay = Replay(self.follower, self.chosen, seed=self.seed)

    def close(self) -> None:
        self.follower.close()
        self.writer.close()

    def go(self, script: Sequence[tuple[int, int]], start: int, stop: int) -> None:
        for step in range(start, stop):
            p, count = script[step]
            self.writer.put(
                [trajectory(p, (p, i), step, reward=i / 3, uid=f"{step}-{i}") for i in range(count)]
            )  # many of them duplicates; putting again what was put before the crash changes nothing
            self.follower.until = sum(count for _, count in script[: step + 1])
            self.replay.now = Version(0, step)
            if self.replay.ready(2, 3) is None:
                self.sampled.append(uids(self.replay.sample(2, 3)))


@settings(deadline=None, max_examples=30)
@example(
    script=[(0, 0), (0, 0), (0, 2), (0, 4), (0, 0), (0, 0), (0, 0), (1, 3)],
    saved_at=3,
    lost=0,
    seed=1_073_741_825,
    chosen=PLAIN,
)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8)), min_size=8, max_size=20),
    st.integers(0, 7),
    st.integers(0, 3),
    st.integers(0, 2**31),
    st.sampled_from([PLAIN, ANCESTOR]),
)
def test_a_resumed_replay_samples_exactly_as_one_that_was_never_interrupted(
    script: list[tuple[int, int]], saved_at: int, lost: int, seed: int, chosen: ReplaySettings
) -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        whole, resumed = Run(Path(one), seed, chosen), Run(Path(other), seed, chosen)
        whole.go(script, 0, len(script))
        resumed.go(script, 0, saved_at)
        kept = len(resumed.sampled)
        state = json.loads(json.dumps(resumed.replay.state()))
        resumed.go(script, saved_at, min(saved_at + lost, len(script)))  # trained, then lost: its weights are gone
        resumed.close()
        del resumed.sampled[kept:]
        resumed.open()
        resumed.replay.restore(state)
        assert resumed.follower.position == state["position"]
        resumed.go(script, saved_at, len(script))
        assert resumed.sampled == whole.sampled
        assert resumed.replay.ledger() == whole.replay.ledger()
        assert resumed.replay.metrics() == whole.replay.metrics()
        resumed.close()
        whole.close()


def test_a_replay_that_is_resumed_after_a_reset_has_the_scores_it_had_and_asks_for_the_others(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    run.go([(0, 8), (1, 8), (2, 8)], 0, 3)
    run.replay.reference = LATER
    run.writer.put_scores(scores_of(run.writer.unscored(LATER, 9, 0.0)))
    assert run.replay.ready(2, 3) is None
    state = json.loads(json.dumps(run.replay.state()))
    left = run.replay.buffer.unscored()
    expected = [uids(run.replay.sample(2, 3)) for _ in range(4)]
    run.close()
    run.open()
    run.follower.until = 24
    run.replay.restore(state)
    assert run.replay.reference == LATER
    assert [uids(run.replay.sample(2, 3)) for _ in range(4)] == expected
    assert [t.uid for t in run.writer.unscored(LATER, 99, 0.0)] == left[::-1] != []
    run.close()


def test_only_a_fresh_replay_can_be_resumed(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    run.go([(0, 4)], 0, 1)
    with pytest.raises(ValueError, match="only a fresh replay can be restored"):
        run.replay.restore(run.replay.state())
    run.close()


def test_pacing_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match=r"--replay\.pacing\.warm-up is -1"):
        Pacing(warm_up=-1)
    with pytest.raises(UserError, match=r"--replay\.pacing\.max-mean-uses is 0"):
        Pacing(max_mean_uses=0)


NOTHING_HELD = BufferSettings(per_prompt=6, total=20, memory_gb=0.0)


def test_a_buffer_that_reads_every_body_from_the_journal_draws_the_same_batches(tmp_path: Path) -> None:
    """Also after resets of the reference, and while the journal is kept to less than the buffer has."""
    path, reference = tmp_path / "journal", Version()
    with (
        JournalWriter(path, "s") as searcher,
        JournalFollower(path, keep_bytes=4096) as lean_follower,  # the first one has the retention
        JournalFollower(path) as follower,
    ):
        followers = {lean_follower: NOTHING_HELD, follower: replace(NOTHING_HELD, memory_gb=1.0)}
        lean, plain = (
            Replay(source, settings_of(max_mean_uses=50.0, buffer=buffer), resets=True)
            for source, buffer in followers.items()
        )
        for step in range(1, 13):
            new = [trajectory(p, (p, step, *range(300))) for p in range(3)]
            searcher.put([replace(t, reference=reference) for t in new])
            for replay in (lean, plain):
                replay.drain()
            if step % 4 == 0:
                reference = Version(0, step)
                lean.reference = plain.reference = reference
                searcher.put_scores(scores_of(searcher.unscored(reference, 99, 60.0), reference))
            if step > 1:
                assert lean.ready(2, 3) is None
                assert plain.ready(2, 3) is None
                assert same(lean.sample(2, 3), plain.sample(2, 3))
        assert lean.ledger() == plain.ledger()
        assert len(lean.buffer) == 18
        assert lean.buffer.needed_from(False) == lean.buffer.needed_from(True) == 36 - 18 + 1
        assert plain.buffer.needed_from(False) is None
        assert lean_follower.totals().retired_rows == 33 - 18  # all but what was in the buffer before the last came


def test_what_is_damaged_after_it_was_let_go_of_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with JournalWriter(path, "s") as writer, JournalFollower(path) as follower:
        writer.put([trajectory(0, (i, 7), uid=f"t{i}") for i in range(6)])
        replay = Replay(follower, settings_of(max_mean_uses=50.0, buffer=NOTHING_HELD))
        assert replay.drain() == 6
        writer._database.rows("UPDATE bodies SET body = substr(body, 1, 60) WHERE seq = 2")
        writer._database.rows("DELETE FROM bodies WHERE seq = 5")
        seen = {uid for _ in range(20) for uid in uids(replay.sample(1, 4))}
        assert seen == {"t0", "t2", "t3", "t5"}
        ledger = replay.ledger()
        assert (ledger["damaged_trajectories"], ledger["damaged_tokens"]) == (2, 4)
        assert (ledger["received_trajectories"], ledger["trained_once_trajectories"]) == (6, 4)
        assert replay.sample_if_ready(1, 4) != "empty"
        writer._database.rows("DELETE FROM bodies")
        assert replay.sample_if_ready(1, 4) == "empty"


def test_what_was_damaged_on_the_disk_or_has_left_it_is_received_and_accounted_for(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with JournalWriter(path, "searcher-0") as writer, JournalFollower(path) as follower:
        writer.put([trajectory(0, (i, 7), uid=f"t{i}") for i in range(6)])
        writer._database.rows("UPDATE bodies SET body = substr(body, 1, 60) WHERE seq IN (2, 5)")
        writer._database.rows("DELETE FROM bodies WHERE seq <= 1")
        writer._database.rows("UPDATE totals SET value = 1, again = 1 WHERE name = 'retired_until'")
        replay = Replay(follower, settings_of())
        assert replay.drain() == 3
        ledger = replay.ledger()
        assert [ledger[f"{term}_trajectories"] for term in ("received", "waiting", "evicted", "damaged")] == [
            6,
            3,
            1,
            2,
        ]
        assert [ledger[f"{term}_tokens"] for term in ("received", "waiting", "evicted", "damaged")] == [12, 6, 2, 4]
        state = json.loads(json.dumps(replay.state()))
    with JournalFollower(path) as follower:
        again = Replay(follower, settings_of())
        again.restore(state)
        assert again.ledger() == ledger


def test_a_journal_that_was_recovered_between_two_incarnations_leaves_the_account_closed(tmp_path: Path) -> None:
    path, count = tmp_path / "journal", 40
    with JournalWriter(path, "searcher-0") as writer, JournalFollower(path) as follower:
        writer.put([trajectory(i % 4, (i, *range(300)), uid=f"t{i}") for i in range(20)])
        replay = Replay(follower, settings_of())
        assert replay.ready(2, 4) is None
        replay.sample(2, 4)
        writer.put([trajectory(i % 4, (i, *range(300)), uid=f"t{i}") for i in range(20, count)])
        state = json.loads(json.dumps(replay.state()))
    with path.open("r+b") as file:  # a page of bodies in the middle
        data = file.read()
        pages = [at for at in range(0, len(data), 8192) if data[at] == 13 and b'"provenance"' in data[at : at + 8192]]
        file.seek(pages[-2])
        file.write(bytes(8192))
    with JournalFollower(path) as follower:
        (recovery,) = follower.recoveries()
        again = Replay(follower, settings_of())
        again.restore(state)
        again.drain()
        ledger = again.ledger()
    assert recovery.lost_rows > 0
    assert ledger["received_trajectories"] == count
    assert ledger["damaged_trajectories"] == recovery.lost_rows
    terms = ("trained_once", "waiting", "evicted", "duplicate", "damaged")
    for unit in ("trajectories", "tokens"):
        assert ledger[f"received_{unit}"] == sum(ledger[f"{term}_{unit}"] for term in terms)
