"""The soft penalty for overlong answers: DAPO's line, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.rollout.overlong import Overlong
from tba.types import Completion, Judgement, StopReason, Version


def answer(tokens: int, stop: StopReason = StopReason.EOS) -> Completion:
    return Completion(np.zeros(tokens, np.int32), "", stop, (Version(), Version()))


def test_it_is_the_line_of_dapo_between_16384_and_20480_tokens() -> None:
    overlong = Overlong(1.0, 20_480)
    for tokens, off in ((1, 0.0), (16_384, 0.0), (17_408, 0.25), (18_432, 0.5), (20_480, 1.0)):
        assert overlong.penalise(answer(tokens), Judgement(1.0)).reward == pytest.approx(1.0 - off)
    assert overlong.penalise(answer(20_480, StopReason.LENGTH), Judgement(0.0)).reward == -1.0
    assert (
        overlong.penalise(answer(9, StopReason.LENGTH), Judgement(0.0)).reward == -1.0
    )  # the room of an episode was less


@given(tokens=st.integers(1, 100), reward=st.floats(-1, 1), penalty=st.floats(0, 3))
def test_what_is_taken_off_is_among_the_parts_which_still_add_up(tokens: int, reward: float, penalty: float) -> None:
    judged = Overlong(penalty, 100).penalise(answer(tokens), Judgement(reward))
    assert judged.reward <= reward
    assert set(judged.parts) == ({"task", "overlong"} if penalty else set())  # of every answer: means are over all
    assert sum(judged.parts.values() if penalty else [reward]) == pytest.approx(judged.reward)


def test_without_a_penalty_a_judgement_stays_the_same_object() -> None:
    judgement = Judgement(0.5, {"format": 0.5})
    assert Overlong().penalise(answer(10, StopReason.LENGTH), judgement) is judgement


def test_to_drop_is_to_leave_out_what_is_cut_off_and_nothing_else() -> None:
    judgement, drop = Judgement(0.5, {"format": 0.5}), Overlong("drop", 10)
    assert drop.drops(answer(10, StopReason.LENGTH))
    assert drop.drops(answer(3, StopReason.LENGTH))
    assert not drop.drops(answer(10))
    assert drop.penalise(answer(10), judgement) is judgement
    assert not Overlong(1.0, 10).drops(answer(10, StopReason.LENGTH))
