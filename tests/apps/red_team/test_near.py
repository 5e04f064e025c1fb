"""Near duplicates against a plain search, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.trajectory_cases import plain_edits, prompt, trajectory

from tba.apps.red_team.near import HashedNgrams, NearDuplicates, edits
from tba.errors import UserError
from tba.replay.buffer import Buffer, BufferSettings, Tally
from tba.replay.codec import StoredTrajectory
from tba.types import FloatArray, Trajectory

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=9)


@settings(deadline=None, max_examples=100)
@given(TOKENS, st.lists(TOKENS, max_size=8))
def test_edits_to_many_answers_at_once_are_those_of_the_table_cell_by_cell(
    answer: list[int], others: list[list[int]]
) -> None:
    found = edits(np.array(answer, dtype=np.int32), [np.array(other, dtype=np.int32) for other in others])
    assert found.tolist() == [plain_edits(answer, other) for other in others]


def test_the_edits_of_known_words() -> None:
    words = [np.frombuffer(word.encode(), dtype=np.uint8).astype(np.int32) for word in ("sitting", "kitten", "k", "")]
    assert edits(words[1], words).tolist() == [3, 0, 5, 6]


class Spelled:
    """Embeds a text that says its own direction."""

    def embed(self, sentences: Sequence[str]) -> FloatArray:
        return np.array([sentence.split() for sentence in sentences], dtype=np.float32)


def saying(of: Trajectory, direction: list[float]) -> Trajectory:
    return replace(of, completion=replace(of.completion, text=" ".join(map(str, direction))))


def cosine(left: list[float], right: list[float]) -> float:
    norms = np.linalg.norm(left) * np.linalg.norm(right)
    return float(np.dot(left, right) / norms) if norms else -1.0


CHANGES = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 400), min_size=1, max_size=8), st.booleans()), max_size=40
)


@settings(deadline=None, max_examples=60)
@given(CHANGES, st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.sampled_from(["edit", "cosine"]))
def test_whatever_came_and_went_the_near_ones_are_exactly_those_within_the_distance(
    changes: list[tuple[int, list[int], bool]], distance: float, by: str
) -> None:
    there: dict[int, tuple[int, StoredTrajectory, list[float]]] = {}
    chosen = NearDuplicates("edit" if by == "edit" else "cosine", distance, embedding=Spelled())
    index = chosen.start(lambda row: there[row][1].tokens)
    for row, (p, tokens, leaves) in enumerate(changes):
        direction = [float(tokens.count(d % 5) - (d % 3)) for d in range(4)]
        new = StoredTrajectory.of(saying(trajectory(p, tokens), direction))
        expected = set()
        for other, (q, stored, pointing) in there.items():
            if by == "edit":
                near = plain_edits(tokens, stored.tokens.tolist()) < distance * (new.length + stored.length)
            else:
                near = cosine(direction, pointing) > 1 - distance + 1e-4
                if abs(cosine(direction, pointing) - 1 + distance) < 1e-4:
                    continue
            expected |= {other} if near and p == q else set()
        assert expected <= set(index.of(new).tolist())
        assert by == "cosine" or expected == set(index.of(new).tolist())
        index.add(row, new)
        there[row] = (p, new, direction)
        if leaves:
            gone = sorted(there)[len(tokens) % len(there)]
            index.remove(gone, prompt(there.pop(gone)[0]).key)


def test_more_of_one_token_than_a_byte_can_count_hides_nothing() -> None:
    said = [(1,) * 600, (1,) * 590, (1,) * 300 + (2,) * 300, (1,) * 300 + (3,) * 10]
    stored = [StoredTrajectory.of(trajectory(0, tokens)) for tokens in said]
    index = NearDuplicates("edit", 0.01).start(lambda row: stored[row].tokens)
    for row in (0, 2, 3):
        index.add(row, stored[row])
    assert index.of(stored[1]).tolist() == [0]  # 10 edits of 1190 tokens
    assert index.of(StoredTrajectory.of(trajectory(0, (1,) * 303 + (3,) * 9))).tolist() == [3]  # 3 of 622


EDIT = BufferSettings(deduplicate=False, near_duplicates=NearDuplicates("edit", 0.25))
FIVE = (1, 2, 3, 4, 5)


def uids(buffer: Buffer, key: str = prompt(0).key) -> list[str]:
    return [t.uid for t in buffer.of(key)]


def test_of_two_near_answers_the_better_rewarded_stays_and_at_a_tie_the_earlier() -> None:
    buffer = Buffer(EDIT)
    one_off, far = (1, 2, 9, 4, 5), (9, 9, 9, 9, 5)  # 1 and 4 edits from the five, of 10 tokens together
    for tokens, reward, uid in ((FIVE, 1.0, "a"), (one_off, 1.0, "tie"), (one_off, 0.5, "worse"), (far, 0.0, "far")):
        buffer.add(trajectory(0, tokens, reward=reward, uid=uid))
    assert uids(buffer) == ["a", "far"]
    buffer.add(trajectory(0, one_off, reward=2.0, uid="better"))
    assert uids(buffer) == ["far", "better"]
    buffer.add(trajectory(1, one_off, reward=9.0))  # to another prompt: near nothing
    assert uids(buffer) == ["far", "better"]
    assert buffer.counts().duplicate == Tally(3, 15)


def test_one_that_is_better_than_several_near_ones_takes_the_place_of_all_and_is_refused_if_one_is_better() -> None:
    between = (1, 2, 9, 4, 8)  # one edit from each, which are two from each other: 0.2, which is near too
    ends = ((1, 2, 9, 4, 5), (1, 2, 3, 4, 8))
    for rewards, left in (((0.0, 1.0), ["mid"]), ((0.0, 3.0), ["0", "1"])):
        buffer = Buffer(replace(EDIT, near_duplicates=NearDuplicates("edit", 0.2)))
        for i, tokens in enumerate(ends):
            buffer.add(trajectory(0, tokens, reward=rewards[i], uid=str(i)))
        assert uids(buffer) == ["0", "1"]  # 2 edits of 10 tokens are not below 0.2
        buffer.add(trajectory(0, between, reward=2.0, uid="mid"))
        assert uids(buffer) == left


def test_by_cosine_the_embeddings_decide_and_not_the_tokens() -> None:
    buffer = Buffer(BufferSettings(near_duplicates=NearDuplicates("cosine", 0.1, embedding=Spelled())))
    for i, (uid, direction, reward) in enumerate(
        (
            ("east", [2.0, 0.0], 0.0),
            ("nearly east", [1.0, 0.3], 1.0),  # a cosine of 0.958
            ("north", [0.0, 5.0], 0.0),
            ("nowhere", [0.0, 0.0], 0.0),
        )
    ):
        buffer.add(saying(trajectory(0, (i, 5), reward=reward, uid=uid), direction))
    assert uids(buffer) == ["nearly east", "north", "nowhere"]


def test_over_capacity_the_lowest_reward_leaves_and_of_equal_ones_the_oldest() -> None:
    buffer = Buffer(BufferSettings(per_prompt=3, total=4, evict="lowest_reward"))
    for i, reward in enumerate((0.5, 0.0, 0.0, 1.0, -1.0, 0.2)):
        buffer.add(trajectory(0, (i,), reward=reward, uid=str(i)))
    assert uids(buffer) == ["0", "3", "5"]
    for i, reward in enumerate((0.3, 0.6)):
        buffer.add(trajectory(1, (i,), reward=reward, uid=f"other {i}"))
    assert uids(buffer) + uids(buffer, prompt(1).key) == ["0", "3", "other 0", "other 1"]
    assert buffer.counts().evicted.trajectories == 4


def test_of_what_is_not_kept_the_last_can_be_drawn_as_recent() -> None:
    buffer = Buffer(replace(EDIT, per_prompt=2, total=2, evict="lowest_reward", keep_recent=True))

    def recent() -> list[str]:
        return [t.uid for t in buffer.numbered(buffer.newest(prompt(0).key, 9, 9))]

    for i, (tokens, reward) in enumerate(((FIVE, 1.0), ((1, 2, 3, 4, 9), 0.0), ((7,), 0.5), ((8, 8), 0.2))):
        buffer.add(trajectory(0, tokens, version=i, reward=reward, uid=str(i)))
    assert uids(buffer) == ["0", "2"]
    assert recent() == ["0", "1", "2", "3"]
    assert buffer.counts().waiting == Tally(4, 13)
    buffer.use(buffer.numbered(buffer.newest(prompt(0).key, 1, 9)))  # of "3"
    for i, left in ((4, ["0", "2", "3", "4"]), (5, ["0", "2", "4", "5"])):  # two that are kept, and two that are not
        buffer.add(trajectory(0, (9, 9, i), reward=0.1 / i, uid=str(i)))
        assert recent() == left
    assert uids(buffer) == ["0", "2"]
    counts = buffer.counts()
    assert (counts.trained_once, counts.duplicate, counts.evicted) == (Tally(1, 2), Tally(1, 5), Tally())


def test_a_distance_at_which_all_or_none_are_near_is_refused() -> None:
    for distance in (0.0, 2.5, float("nan")):
        with pytest.raises(UserError, match=r"--replay\.buffer\.near-duplicates\.distance"):
            NearDuplicates("edit", distance)


def test_a_word_changed_lies_near_and_other_words_lie_far() -> None:
    said, nearly, other = HashedNgrams().embed(
        ["Name three rivers of northern Europe.", "name three rivers of  Northern europe!", "How is bread baked?"]
    )
    assert said @ nearly > 0.9
    assert abs(said @ other) < 0.25


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=12), max_size=5))
def test_any_text_has_a_place_of_length_1_or_none_and_it_is_its_own(texts: list[str]) -> None:
    rows = HashedNgrams(dimensions=16).embed(texts)
    assert rows.shape == (len(texts), 16)
    assert np.isfinite(rows).all()
    norms = np.linalg.norm(rows, axis=1)
    assert np.all((np.abs(norms - 1) < 1e-5) | (norms == 0))
    for text, row in zip(texts, rows, strict=True):
        assert np.array_equal(HashedNgrams(dimensions=16).embed([text])[0], row)


def test_runs_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(UserError, match="runs of 5 to 4 bytes"):
        HashedNgrams(shortest=5)
