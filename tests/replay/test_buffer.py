"""The trainer's memory, against a plain list that is searched from end to end."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trajectory_cases import plain_edits, prompt, same, trajectory

from tba.apps.red_team.near import NearDuplicates
from tba.errors import UserError
from tba.replay.buffer import UNUSED_FATES, Buffer, BufferSettings, Tally
from tba.replay.prompt_index import Listing
from tba.types import ELSEWHERE, Score, Trajectory, Version

WITHIN = 6  # the last arrivals that count as the newest


@dataclass
class PlainBuffer:
    """The same rules, each written as a search through everything."""

    settings: BufferSettings
    now: Version = field(default_factory=Version)
    reference: Version = field(default_factory=Version)
    held: list[Trajectory] = field(default_factory=list)
    everything: list[Trajectory] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)
    fate: dict[str, str] = field(default_factory=dict)  # of those that left unused
    passing: list[tuple[Trajectory, str]] = field(default_factory=list)  # kept no longer, and recent; and their fate

    def add(self, new: Trajectory) -> None:
        self.everything.append(new)
        if self.settings.deduplicate and any(
            (t.prompt.key, t.completion.digest) == (new.prompt.key, new.completion.digest) and t.version > new.version
            for t in self.here
        ):
            self.fate[new.uid] = "duplicate"
            return
        for copy, *fate in [(t,) for t in self.held] + self.passing:
            same_answer = copy.completion.digest == new.completion.digest
            if self.settings.deduplicate and same_answer and copy.prompt.key == new.prompt.key:
                self._leave(copy, fate[0] if fate else "duplicate")
        near = [t for t in self.held if t.prompt.key == new.prompt.key and self._near(t, new)]
        self.held.append(new)
        best = max((t.reward for t in near), default=-np.inf)
        worse = (
            self.settings.near_duplicates is not None
            and self.settings.near_duplicates.keep == "better"
            and best >= new.reward
        )
        for t in [new] if worse else near:
            self._let_go(t, "duplicate")
        for members, most in (
            ([t for t in self.held if t.prompt.key == new.prompt.key], self.settings.per_prompt),
            (self.held, self.settings.total),
        ):
            if len([t for t in members if t in self.held]) > most:
                lowest = min(t.reward for t in members)
                leave = members[0] if self.settings.evict == "oldest" else None
                self._let_go(leave or next(t for t in members if t.reward == lowest), "evicted")

    def place(self, of: Trajectory) -> int:
        return 1 + [t.uid for t in self.everything].index(of.uid)

    def _near(self, left: Trajectory, right: Trajectory) -> bool:
        edits = plain_edits(left.completion.tokens.tolist(), right.completion.tokens.tolist())
        return self.settings.near_duplicates is not None and edits < NEAR.distance * (left.length + right.length)

    def _let_go(self, old: Trajectory, fate: str) -> None:
        if self.settings.keep_recent and self._is_recent(old):
            self.held.remove(old)
            self.passing.append((old, fate))
            if len(self.passing) > self.settings.total:
                self._leave(*self.passing[0])
        else:
            self._leave(old, fate)

    def move(self, now: Version) -> None:
        self.now = now
        for old, fate in list(self.passing):
            if not self._is_recent(old):
                self._leave(old, fate)

    def score(self, uid: str, reference: Version, finite: bool) -> None:
        for place, old in enumerate(self.held):
            if old.uid == uid and reference == self.reference != old.reference:
                if finite:
                    log_reference = np.full(old.length, -3.0, dtype=np.float32)
                    self.held[place] = replace(old, reference=reference, log_reference=log_reference)
                else:
                    self._leave(old, "evicted")
                return

    def _leave(self, old: Trajectory, fate: str) -> None:
        self.held = [t for t in self.held if t is not old]
        self.passing = [(t, f) for t, f in self.passing if t is not old]
        if old.uid not in self.uses:
            self.fate[old.uid] = fate

    def of(self, key: str) -> list[Trajectory]:
        return [t for t in self.held if t.prompt.key == key and t.reference == self.reference]

    def _is_recent(self, t: Trajectory) -> bool:
        return t.version != ELSEWHERE and t.reference == self.reference

    @property
    def here(self) -> list[Trajectory]:
        return sorted([*self.held, *(t for t, _ in self.passing)], key=self._order)

    def _order(self, t: Trajectory) -> int:
        return [other.uid for other in self.everything].index(t.uid)

    def is_late(self, t: Trajectory) -> bool:
        return len(self.everything) - self._order(t) > WITHIN

    def newest(self, key: str, size: int) -> list[Trajectory]:
        """In the order of their turns."""
        newest = [t for t in self.here if t.prompt.key == key and self._is_recent(t)][::-1]
        return sorted(newest, key=lambda t: self.is_late(t) or self.uses.get(t.uid, 0) > 0)[:size]

    def newest_prompts(self, keys: Sequence[str], size: int) -> list[str]:
        turns = []
        for key in keys:
            last = max(
                (t for t in self.here if t.prompt.key == key and self._is_recent(t)), key=self._order, default=None
            )
            drawn = self.newest(key, size)
            if last is not None and len(drawn) == size:
                uses = 0 if self.is_late(last) else sum(self.uses.get(t.uid, 0) for t in drawn)
                turns.append((self.is_late(last), uses, -self._order(last), key))
        return [key for *_, key in sorted(turns)]

    def amounts(self) -> dict[str, tuple[int, int]]:
        groups = {
            "received": self.everything,
            "trained_once": [t for t in self.everything if t.uid in self.uses],
            "trained_total": [t for t in self.everything for _ in range(self.uses.get(t.uid, 0))],
            "waiting": [t for t in self.here if t.uid not in self.uses],
            "evicted": [t for t in self.everything if self.fate.get(t.uid) == "evicted"],
            "duplicate": [t for t in self.everything if self.fate.get(t.uid) == "duplicate"],
        }
        return {name: (len(ts), sum(t.length for t in ts)) for name, ts in groups.items()}


def uids(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.uid for t in trajectories]


VERSIONS = st.just(ELSEWHERE) | st.builds(Version, st.integers(0, 1), st.integers(0, 8))
OPERATIONS = st.lists(
    st.tuples(
        st.just("add"),
        st.integers(0, 3),
        st.integers(0, 5),
        VERSIONS,
        st.integers(0, 4).map(lambda n: n == 0),
        st.integers(0, 2),
    )
    | st.tuples(st.sampled_from(["use", "take_back"]), st.integers(0, 99))
    | st.tuples(st.just("now"), VERSIONS)
    | st.tuples(st.just("reference"), st.booleans())
    | st.tuples(st.just("score"), st.integers(0, 99), st.booleans(), st.integers(0, 9).map(lambda n: n > 0)),
    max_size=60,
)


# Answers of 4 to 6 tokens are near those of one token more or less, and no others are.
NEAR = NearDuplicates("edit", 0.6)
SETTINGS = st.builds(
    BufferSettings,
    st.integers(2, 4),
    st.integers(2, 9),
    deduplicate=st.booleans(),
    near_duplicates=st.sampled_from([None, NEAR, replace(NEAR, keep="newer")]),
    evict=st.sampled_from(["oldest", "lowest_reward"]),
    keep_recent=st.booleans(),
)


@settings(deadline=None, max_examples=250)
@example(  # what is kept no longer when the reference is reset is not scored anew
    [
        *(("add", 1, 2, Version(), False, 0), ("add", 1, 2, Version(), False, 0)),
        *(("reference", True), ("score", 1, True, True)),
    ],
    BufferSettings(2, 2, deduplicate=False, near_duplicates=NEAR, keep_recent=True),
)
@given(OPERATIONS, SETTINGS)
def test_after_any_operations_the_buffer_holds_what_the_rules_say_and_its_ledger_closes(
    operations: list[tuple[object, ...]], chosen: BufferSettings
) -> None:
    buffer, plain = Buffer(chosen), PlainBuffer(chosen)
    keys = [prompt(p).key for p in range(4)]
    for verb, *values in operations:
        if verb == "add":
            p, completion, version, other_reference, reward = values
            tokens = (int(completion),) * (1 + int(completion))
            new = trajectory(int(p), tokens, version, float(reward), reference=Version(0, int(other_reference)))
            buffer.add(new)
            plain.add(new)
        elif verb == "use" and plain.here:
            used = plain.here[int(values[0]) % len(plain.here)]
            buffer.use([used])
            plain.uses[used.uid] = plain.uses.get(used.uid, 0) + 1
            assert buffer.fates()[plain.place(used)] == plain.uses[used.uid]
        elif verb == "take_back" and (used_before := [t for t in plain.here if plain.uses.get(t.uid)]):
            back = used_before[int(values[0]) % len(used_before)]
            buffer.take_back([back])
            plain.uses[back.uid] -= 1
            if plain.uses[back.uid] == 0:
                del plain.uses[back.uid]
            assert buffer.fates()[plain.place(back)] == plain.uses.get(back.uid, 0)
        elif verb == "now":
            buffer.now = values[0]
            plain.move(values[0])
        elif verb == "reference":
            buffer.reference = plain.reference = Version(0, int(values[0]))
        elif verb == "score" and plain.everything:
            scored, reference = plain.everything[int(values[0]) % len(plain.everything)], Version(0, int(values[1]))
            log_reference = np.full(scored.length, -3.0 if values[2] else np.nan, dtype=np.float32)
            buffer.score(Score(scored.uid, reference, log_reference))
            plain.score(scored.uid, reference, bool(values[2]))
        for size in (1, 2, 3):
            assert set(buffer.prompts(size)) == {k for k in keys if len(plain.of(k)) >= size}
            turns = plain.newest_prompts(keys, size)
            assert buffer.newest_prompts(size, WITHIN, 4) == turns
            few = buffer.newest_prompts(size, WITHIN, 1)
            assert turns[: len(few)] == few
            assert len(few) >= min(1, len(turns))
    for key in keys:
        assert all(map(same, list(buffer.of(key)), plain.of(key)))
        assert uids(buffer.of(key)) == uids(plain.of(key))
        for size in (2, 99):
            numbers = buffer.newest(key, size, WITHIN)
            assert [uids(buffer.numbered([n]))[0] for n in numbers] == uids(plain.newest(key, size))
            assert uids(buffer.numbered(numbers)) == uids(sorted(plain.newest(key, size), key=plain._order))
        assert buffer.rewards(key).tolist() == [t.reward for t in plain.of(key)]
    assert buffer.unscored() == [t.uid for t in plain.held if t.reference != plain.reference]
    assert buffer.references == {t.reference for t in plain.here}
    assert buffer.sampleable == len([t for t in plain.here if t.reference == plain.reference])
    counts, expected = buffer.counts(), plain.amounts()
    assert {n: (getattr(counts, n).trajectories, getattr(counts, n).tokens) for n in expected} == expected
    for unit in ("trajectories", "tokens"):
        terms = [getattr(a, unit) for a in (counts.trained_once, counts.waiting, counts.evicted, counts.duplicate)]
        assert getattr(counts.received, unit) == sum(terms)
    assert len(buffer) == len(plain.here)
    assert len(plain.held) <= chosen.total
    # the record of each place says the same: its uses, or how it left unused
    said = [plain.uses.get(t.uid) or plain.fate.get(t.uid, 0) for t in plain.everything]
    assert [UNUSED_FATES.get(n, n) for n in buffer.fates()[1:].tolist()] == said


def test_a_newer_copy_replaces_the_older_and_becomes_the_newest() -> None:
    buffer = Buffer(BufferSettings())
    old, other, copy = trajectory(tokens=(1,), uid="old"), trajectory(tokens=(2,)), trajectory(tokens=(1,), uid="copy")
    for t in (old, other, copy):
        buffer.add(t)
    assert uids(buffer.of(old.prompt.key)) == [other.uid, "copy"]
    assert buffer.counts().duplicate == Tally(1, 1)


def test_equal_tokens_in_other_segments_are_no_copy_and_in_the_same_ones_are() -> None:
    def episode(begins: list[int], uid: str) -> Trajectory:
        t = trajectory(tokens=(1, 2, 3), uid=uid)
        mask, places = np.array([True, False, False]), np.array(begins, np.int32)
        return replace(t, completion=replace(t.completion, mask=mask, begins=places if begins else None))

    buffer = Buffer(BufferSettings())
    for t in (episode([], "one"), episode([1], "two"), episode([2], "other"), episode([1], "again")):
        buffer.add(t)
    assert uids(buffer.of(trajectory().prompt.key)) == ["one", "other", "again"]
    assert buffer.counts().duplicate == Tally(1, 3)


def test_copies_stay_side_by_side_when_the_settings_say_so() -> None:
    buffer = Buffer(BufferSettings(deduplicate=False))
    copies = [trajectory(tokens=(1,)) for _ in range(3)]
    for t in copies:
        buffer.add(t)
    assert uids(buffer.of(copies[0].prompt.key)) == uids(copies)
    assert buffer.counts().duplicate == Tally(0, 0)


LATER = Version(0, 50)


def test_a_copy_under_another_reference_is_a_copy() -> None:
    buffer = Buffer(BufferSettings())
    first, second = trajectory(), trajectory(reference=LATER)
    buffer.add(first)
    buffer.add(second)
    assert uids(buffer.of(first.prompt.key)) == []
    buffer.reference = LATER
    assert uids(buffer.of(first.prompt.key)) == [second.uid]
    assert (buffer.counts().waiting.trajectories, buffer.counts().duplicate.trajectories) == (1, 1)


def test_what_is_scored_under_the_new_reference_keeps_its_age_and_its_uses_and_is_counted_once() -> None:
    buffer = Buffer(BufferSettings(per_prompt=3))
    rows = [trajectory(tokens=(i,), uid=f"t{i}") for i in range(3)]
    for t in rows:
        buffer.add(t)
    buffer.use([rows[1], rows[1]])
    before = buffer.counts()
    buffer.reference = LATER
    assert buffer.unscored() == ["t0", "t1", "t2"]
    for t in (rows[2], rows[1]):  # newest first
        buffer.score(Score(t.uid, LATER, np.array([-0.25], dtype=np.float32)))
    found = buffer.of(rows[0].prompt.key)
    assert [(t.uid, t.reference, float(t.log_reference[0])) for t in found] == [
        ("t1", LATER, -0.25),
        ("t2", LATER, -0.25),
    ]
    assert buffer.counts() == before
    assert buffer.fates().tolist() == [0, 0, 2, 0]
    buffer.use([found[0]])
    assert buffer.counts().trained_once == Tally(1, 1)
    buffer.add(trajectory(tokens=(3,), reference=LATER, uid="last"))  # the oldest leaves, which nobody has scored
    assert buffer.counts().evicted == Tally(1, 1)
    assert buffer.unscored() == []


def test_what_was_used_and_leaves_is_counted_as_trained_and_not_as_evicted() -> None:
    buffer = Buffer(BufferSettings(per_prompt=2))
    rows = [trajectory(tokens=(i,)) for i in range(4)]
    buffer.add(rows[0])
    buffer.use([rows[0], rows[0]])
    for t in rows[1:]:
        buffer.add(t)
    counts = buffer.counts()
    assert (counts.trained_once, counts.trained_total) == (Tally(1, 1), Tally(2, 2))
    assert (counts.evicted, counts.waiting) == (Tally(1, 1), Tally(2, 2))
    with pytest.raises(KeyError, match="not in memory"):
        buffer.use([rows[0]])


def test_recent_is_by_arrival_whatever_weights_sampled_and_what_came_from_elsewhere_is_not() -> None:
    buffer = Buffer(BufferSettings())
    buffer.now = Version(1, 9)
    versions = (Version(1, 9), Version(0, 2), ELSEWHERE, Version(1, 3))
    for i, version in enumerate(versions):
        buffer.add(trajectory(tokens=(i,), version=version, uid=str(i)))
    key = prompt(0).key
    assert [uids(buffer.numbered([n]))[0] for n in buffer.newest(key, 9, 4)] == ["3", "1", "0"]
    assert uids(buffer.of(key)) == ["0", "1", "2", "3"]


def test_an_older_copy_that_arrives_later_leaves_the_fresher_one_in_its_place() -> None:
    buffer = Buffer(BufferSettings())
    versions = {"fresh": Version(0, 7), "late": Version(0, 3), "former": Version(-1, 0), "equal": Version(0, 7)}
    left = []
    for uid, version in versions.items():
        buffer.add(trajectory(tokens=(1, 2), version=version, uid=uid))
        left += uids(buffer.of(prompt(0).key))
    assert left == ["fresh", "fresh", "fresh", "equal"]
    counts = buffer.counts()
    assert (counts.received, counts.waiting, counts.duplicate) == (Tally(4, 8), Tally(1, 2), Tally(3, 6))


def test_the_same_trajectory_given_twice_is_an_error() -> None:
    buffer = Buffer(BufferSettings())
    t = trajectory(uid="t")
    buffer.add(t)
    with pytest.raises(ValueError, match="trajectory t was added twice"):
        buffer.add(t)


def test_a_capacity_that_holds_no_group_is_refused() -> None:
    with pytest.raises(UserError, match=r"--replay\.buffer\.per-prompt is 1"):
        BufferSettings(per_prompt=1)


@pytest.mark.parametrize("keys", [3, 40])
def test_a_listing_tells_every_key_added_since_any_earlier_look(keys: int) -> None:
    rng = np.random.default_rng(keys)
    listing, cursor, members, unseen = Listing(), 0, set[str](), set[str]()
    for _ in range(5000):
        key = str(rng.integers(keys))
        if rng.random() < 0.05:
            cursor, told = listing.since(cursor)
            assert unseen & members <= set(told)
            unseen = set()
        elif key in members:
            members.remove(key)
            listing.remove(key)
        else:
            members.add(key)
            unseen.add(key)
            listing.add(key)
        assert sorted(listing) == sorted(members)
        assert (key in listing) == (key in members)


def test_the_newest_prompts_take_turns_by_their_uses_and_the_others_come_after_them() -> None:
    buffer = Buffer(BufferSettings(deduplicate=False))
    keys = [prompt(p).key for p in range(4)]
    for p in range(4):
        for i in range(3):
            buffer.add(trajectory(p, (i,)))
    turns = []
    for _ in range(6):
        key = buffer.newest_prompts(2, 9, 1)[0]
        turns.append(keys.index(key))
        buffer.use(buffer.numbered(buffer.newest(key, 2, 9)))
    # of the last 9 arrivals, which are of three prompts; each still has one that was never used, and one with one use
    assert turns == [3, 2, 1, 3, 2, 1]
    assert buffer.newest_prompts(2, 9, 4) == [keys[p] for p in (3, 2, 1, 0)]
    assert buffer.newest_prompts(2, 12, 4) == [keys[p] for p in (0, 3, 2, 1)]
    for _ in range(2):
        buffer.add(trajectory(1, (9,)))
    assert buffer.newest_prompts(2, 9, 1) == [keys[p] for p in (1, 3, 2)]
    assert buffer.newest_prompts(5, 9, 4) == [keys[1]]


def test_what_goes_by_another_incarnation_is_as_new_as_that_and_equal_in_all_else() -> None:
    buffer = Buffer(BufferSettings())
    past = trajectory(tokens=(1, 2), version=Version(0, 7), reward=0.5)
    buffer.now = Version(3, 9)
    buffer.add(past, uses=2, incarnation=3)
    (found,) = buffer.of(past.prompt.key)
    assert found.completion.versions == (Version(3, 7), Version(3, 7))
    assert same(replace(found, completion=replace(found.completion, versions=past.completion.versions)), past)
    assert buffer.fates().tolist() == [0, 2]


def test_what_the_source_could_not_give_is_received_and_accounted_for() -> None:
    buffer = Buffer(BufferSettings())
    buffer.add(trajectory())
    buffer.pass_over(evicted=Tally(3, 30), damaged=Tally(2, 20))
    counts = buffer.counts()
    assert (counts.received, counts.evicted, counts.damaged) == (Tally(6, 52), Tally(3, 30), Tally(2, 20))


def test_prompts_of_one_key_keep_their_own_text_in_memory() -> None:
    buffer, one = Buffer(BufferSettings()), trajectory(tokens=(1,))
    other = replace(trajectory(tokens=(3,)), prompt=replace(one.prompt, text="asked otherwise"))
    for t in (one, other):
        buffer.add(t)
    assert [t.prompt.text for t in buffer.of(one.prompt.key)] == [one.prompt.text, "asked otherwise"]
    assert buffer.of(one.prompt.key)[0].prompt is one.prompt


def test_many_trajectories_are_few_objects_to_the_garbage_collector() -> None:
    buffer = Buffer(BufferSettings(per_prompt=10, total=5000))
    gc.collect()
    before = len(gc.get_objects())
    for i in range(12_000):
        buffer.add(trajectory(i % 600, (i, *range(100))))
    gc.collect()
    assert len(buffer) == 5000
    prompts = 600
    assert len(gc.get_objects()) - before < 20 * prompts
    assert sum(map(bool, buffer._rows._bodies)) == 5000  # what has left is not held
