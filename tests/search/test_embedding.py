"""Places of texts: equal for equal texts, near for nearly equal ones, and kept with what is sent down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.engines.tabular import sample_groups, tabular_prompts
from tba.errors import UserError
from tba.policy.tabular import TabularTask
from tba.protocols import EMBEDDING
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.search.embedding import HashedNgrams, embedded
from tba.types import Sampling


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


def test_the_place_of_a_text_is_kept_in_the_journal(tmp_path: Path) -> None:
    task = TabularTask()
    (group,) = sample_groups(task, tabular_prompts(task)[:1], 5, Sampling(), np.random.default_rng(0))
    with (
        JournalWriter(tmp_path / "journal", "searcher-0") as journal,
        JournalFollower(tmp_path / "journal") as follower,
    ):
        journal.put(embedded(group.trajectories, HashedNgrams()))
        found = follower.drain()
    expected = HashedNgrams().embed([t.completion.text for t in group.trajectories])
    np.testing.assert_allclose([t.arrays[EMBEDDING] for t in found], expected, atol=1e-3)


def test_runs_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(UserError, match="runs of 5 to 4 bytes"):
        HashedNgrams(shortest=5)
