"""Trajectories as bytes."""

from __future__ import annotations

import hashlib
import math
from base64 import b64decode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trajectory_cases import prompt, same, trajectory

from tba.replay.codec import (
    Damaged,
    StoredTrajectory,
    decode_prompt,
    decode_trajectory,
    encode_prompt,
    encode_trajectory,
)
from tba.types import Completion, Prompt, Sampling, StopReason, Trajectory, Version

VERSIONS = st.builds(Version, st.integers(0, 99), st.integers(0, 10**6))
SAMPLINGS = st.builds(
    Sampling, st.floats(0, 2), st.floats(0, 1), st.integers(0, 99), st.floats(0, 1), st.floats(0.5, 2)
) | st.builds(Sampling, st.floats(0, 2), st.floats(0, 1))
TEXT = st.text(max_size=8) | st.just("\ud800 a lone surrogate")
EARLIER = (  # a trajectory as programs before this one wrote it
    "IgEAgHsidWlkIjoic2VhcmNoZXItMC4xIiwibGVuZ3RoIjozLCJsb2dfYmVoYXZpb3IiOnRydWUsIm1hc2siOmZhbHNlLCJ0ZXh0IjoiYSBcImJcIiIs"
    "InN0b3BfcmVhc29uIjoiZW9zIiwidmVyc2lvbnMiOlswLDMsMCw0XSwicmVmZXJlbmNlIjpbMCwxXSwic2FtcGxpbmciOlswLjcsMC45XSwicmV3YXJk"
    "IjowLjI1LCJyZXdhcmRfcGFydHMiOnsicmlnaHQiOjEuMH0sInByb3ZlbmFuY2UiOnsic2VhcmNoZXIiOiJzZWFyY2hlci0wIn0sImNyZWF0ZWQiOjEu"
    "NSwiYXJyYXlzIjpbWyJub3JtcyIsIjxmOCIsWzFdXV19AAADAAAABAAAAAUAAAAAAAAAAACAvwAAAMAAAEDAAAAAAAAAgL8AAADAAAAAvwAAAAAAAAAA"
    "AAAAQHWGD64="
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PLAIN_ARRAYS = hnp.arrays(
    st.sampled_from(["<i4", "<i8", "<f4", "<f8", "<f2", "|u1", "|b1", "<c8"]), hnp.array_shapes(min_dims=0, min_side=0)
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 9))
    logs = hnp.arrays(np.float32, length, elements=st.floats(width=32))
    mask = draw(st.none() | hnp.arrays(np.bool_, length))
    context_places = [] if mask is None else [place for place in range(1, length) if not mask[place]]
    begins = sorted(draw(st.sets(st.sampled_from(context_places)))) if context_places else []
    completion = Completion(
        tokens=draw(hnp.arrays(np.int32, length)),
        text=draw(TEXT),
        stop_reason=draw(st.sampled_from(StopReason)),
        versions=(draw(VERSIONS), draw(VERSIONS)),
        sampling=draw(st.none() | SAMPLINGS),
        log_behavior=draw(st.none() | logs),
        mask=mask,
        begins=np.array(begins, np.int32) if begins else None,
    )
    return Trajectory(
        uid=draw(TEXT),
        prompt=prompt(0),
        completion=completion,
        reward=draw(st.floats()),
        log_reference=draw(logs),
        reference=draw(VERSIONS),
        reward_parts=draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3)),
        arrays=draw(st.dictionaries(TEXT, PLAIN_ARRAYS, max_size=3)),
        provenance=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        created=draw(st.floats(allow_nan=False)),
    )


@settings(deadline=None, max_examples=200)
@given(trajectories())
def test_a_trajectory_comes_back_bit_for_bit(original: Trajectory) -> None:
    assert same(decode_trajectory(encode_trajectory(original), original.prompt), original)


@settings(deadline=None, max_examples=200)
@given(trajectories())
def test_the_facts_of_what_is_stored_are_those_of_the_trajectory(original: Trajectory) -> None:
    stored = StoredTrajectory.of(original)
    assert (stored.uid, stored.length) == (original.uid, original.length)
    assert (stored.version, stored.reference) == (original.version, original.reference)
    assert stored.reward == original.reward or (math.isnan(stored.reward) and math.isnan(original.reward))


@settings(deadline=None)
@given(st.builds(Prompt, TEXT, hnp.arrays(np.int32, st.integers(1, 9)), TEXT, st.dictionaries(TEXT, JSON, max_size=3)))
def test_a_prompt_comes_back_with_what_its_key_leaves_out(original: Prompt) -> None:
    assert same(decode_prompt(encode_prompt(original)), original)


def test_a_trajectory_that_an_earlier_program_wrote_is_read() -> None:
    original = Trajectory(
        uid="searcher-0.1",
        prompt=prompt(0),
        completion=Completion(
            tokens=np.array([3, 4, 5], np.int32),
            text='a "b"',
            stop_reason=StopReason.EOS,
            versions=(Version(0, 3), Version(0, 4)),
            sampling=Sampling(0.7, 0.9),
            log_behavior=np.array([-1, -2, -0.5], np.float32),
        ),
        reward=0.25,
        log_reference=np.array([-1, -2, -3], np.float32),
        reference=Version(0, 1),
        reward_parts={"right": 1.0},
        arrays={"norms": np.array([2.0])},
        provenance={"searcher": "searcher-0"},
        created=1.5,
    )
    assert same(decode_trajectory(b64decode(EARLIER), prompt(0)), original)


def test_a_completion_of_one_segment_has_the_digest_and_the_bytes_of_earlier_programs() -> None:
    tokens, mask = np.array([5, 6, 7, 9, 11], np.int32), np.array([True, True, False, False, True])
    versions = Version(0, 3), Version(0, 4)
    completion = Completion(tokens, "x", StopReason.EOS, versions, Sampling(0.7), np.full(5, -0.5, np.float32), mask)
    asked = Prompt("task", np.array([1, 2], np.int32))
    whole = Trajectory("u", asked, completion, 0.5, np.full(5, -1, np.float32), Version())
    assert completion.digest == "17dda2b7b6411f17"
    assert hashlib.blake2b(encode_trajectory(whole), digest_size=8).hexdigest() == "8de701233e669de3"
    assert StoredTrajectory.of(whole).digest == 2054418841876844032


def test_where_segments_begin_tells_completions_apart() -> None:
    tokens, mask = np.array([5, 6, 7, 9, 11], np.int32), np.array([True, True, False, False, True])
    places = [None, np.array([2], np.int32), np.array([3], np.int32), np.array([2, 3], np.int32)]
    completions = [
        Completion(tokens, "", StopReason.EOS, (Version(), Version()), mask=mask, begins=begins) for begins in places
    ]
    assert len({c.digest for c in completions}) == 4
    logs = np.zeros(5, np.float32)
    rows = [StoredTrajectory.of(Trajectory("u", prompt(0), c, 0.0, logs, Version())) for c in completions]
    assert len({row.digest for row in rows}) == 4
    assert [c.segments for c in completions[::3]] == [[(0, 5)], [(0, 2), (2, 3), (3, 5)]]
    assert [c.turns for c in completions[::3]] == [[(0, 2), (4, 5)]] * 2


@pytest.mark.parametrize("begins", [[], [0], [5], [3, 2], [2, 2], [4]])
def test_segments_out_of_order_or_with_a_trained_first_token_are_refused(begins: list[int]) -> None:
    tokens, mask = np.array([5, 6, 7, 9, 11], np.int32), np.array([True, True, False, False, True])
    with pytest.raises(ValueError, match="later segments of a completion of 5 tokens begin at"):
        Completion(
            tokens, "", StopReason.EOS, (Version(), Version()), mask=mask, begins=np.array(begins, dtype=np.int32)
        )


@pytest.mark.parametrize("mask", [None, np.zeros(4, np.bool_)])
def test_segments_without_a_mask_of_all_tokens_are_refused(mask: np.ndarray | None) -> None:
    tokens, begins = np.array([5, 6, 7, 9, 11], np.int32), np.array([2], np.int32)
    with pytest.raises(ValueError, match="each with a first token whose mask is False"):
        Completion(tokens, "", StopReason.EOS, (Version(), Version()), mask=mask, begins=begins)


def test_what_is_read_cannot_be_changed() -> None:
    read = decode_trajectory(encode_trajectory(trajectory()), prompt(0))
    with pytest.raises(ValueError, match="read-only"):
        read.completion.tokens[0] = 5


@pytest.mark.parametrize("length", range(1, 9))
def test_what_is_read_is_aligned_whatever_the_lengths_before_it(length: int) -> None:
    original = trajectory(tokens=range(length), uid="u" * length)
    read = decode_trajectory(
        encode_trajectory(
            Trajectory(**{**vars(original), "arrays": {"odd": np.ones(3, np.uint8), "values": np.ones(2)}})
        ),
        prompt(0),
    )
    arrays = [read.completion.tokens, read.log_reference, read.arrays["values"]]
    assert [array.flags.aligned for array in arrays] == [True, True, True]


def test_a_body_without_a_checksum_is_damaged() -> None:
    body = bytearray(encode_trajectory(trajectory()))
    body[3] &= 0x7F
    with pytest.raises(Damaged, match="checksum"):
        decode_trajectory(bytes(body), prompt(0))


def test_an_array_that_would_need_pickle_is_refused() -> None:
    original = trajectory()
    odd = Trajectory(**{**vars(original), "arrays": {"steps": np.array([{"no": "pickle"}])}})
    with pytest.raises(ValueError, match="'steps' is of object"):
        encode_trajectory(odd)


def test_reference_log_probabilities_of_another_length_are_refused() -> None:
    original = trajectory(tokens=(1, 2, 3))
    odd = Trajectory(**{**vars(original), "log_reference": np.zeros(2, dtype=np.float32)})
    with pytest.raises(ValueError, match=r"has 3 tokens, but an array of shape \(2,\)"):
        encode_trajectory(odd)
