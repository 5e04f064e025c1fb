"""When `tba check` has timed enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tba.models.huggingface import HuggingFace
from tba.runs.probe import LONG, ROUNDS, _enough, _timed
from tba.settings import find


@pytest.mark.parametrize(
    ("seconds", "enough", "compiled"),
    [
        ([], False, False),
        ([0.1] * ROUNDS, False, False),  # the first warms up
        ([0.1] * (ROUNDS + 1), False, False),  # less than three seconds
        ([0.7] * (ROUNDS + 1), True, True),
        ([LONG + 1], True, False),
        ([LONG + 1], False, True),  # most of it may be the compiler's
        ([LONG + 1, 0.1], True, True),
        ([LONG / 2], False, False),
    ],
)
def test_a_long_round_is_enough_and_of_short_ones_several(seconds: list[float], enough: bool, compiled: bool) -> None:
    quickstart = find("quickstart")
    assert isinstance(quickstart.model, HuggingFace)
    recipe = replace(quickstart, model=replace(quickstart.model, device="cpu", compiled=compiled))
    assert _enough(seconds, 3.0, recipe) is enough


def test_the_first_is_left_out_unless_it_is_the_only_one() -> None:
    assert _timed([5.0, 1.0, 2.0]) == [1.0, 2.0]
    assert _timed([5.0]) == [5.0]
