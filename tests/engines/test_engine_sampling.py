"""The draw: inverse cumulative distribution, temperature, top-p, and the log-probability that goes with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.engines.decoding import DecodingRows, _draw_index, draw, draw_in_blocks
from tba.engines.rules import Rules
from tba.types import Sampling

FOUR = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


def test_uniforms_select_tokens_by_the_cumulative_distribution() -> None:
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.749, 0.751, 0.874, 0.876, 1 - 2**-24])
    token, log_behavior = draw(FOUR.expand(8, 4), uniform, Sampling())
    assert token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_allclose(log_behavior.exp(), [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125], rtol=1e-6)


def test_temperature_one_half_squares_and_renormalises_the_probabilities() -> None:
    token, log_behavior = draw(FOUR.expand(3, 4), torch.tensor([0.1, 0.8, 0.97]), Sampling(temperature=0.5))
    squares = torch.tensor([16.0, 4.0, 1.0, 1.0]) / 22
    assert token.tolist() == [0, 1, 3]
    np.testing.assert_allclose(log_behavior, squares[token].log(), rtol=1e-6)


def test_top_p_keeps_the_fewest_tokens_that_hold_it_and_renormalises_over_them() -> None:
    shuffled = FOUR[[2, 0, 3, 1]]  # probabilities 1/8, 1/2, 1/8, 1/4
    uniform = torch.linspace(0, 1 - 2**-24, 101)
    token, log_behavior = draw(shuffled.expand(101, 4), uniform, Sampling(top_p=0.7))
    assert set(token.tolist()) == {1, 3}
    np.testing.assert_allclose(log_behavior.exp(), torch.where(token == 1, 2 / 3, 1 / 3), rtol=1e-6)


def test_top_p_is_taken_after_temperature() -> None:
    # At T = 1/2 the best token alone holds 16/22 > 0.7, at T = 1 it takes two.
    token, log_behavior = draw(FOUR.expand(50, 4), torch.linspace(0, 0.99, 50), Sampling(temperature=0.5, top_p=0.7))
    assert token.unique().tolist() == [0]
    assert log_behavior.abs().max() == 0


def test_temperature_zero_takes_the_best_token_with_certainty() -> None:
    token, log_behavior = draw(FOUR.flip(0).expand(2, 4), torch.tensor([0.0, 0.99]), Sampling(temperature=0))
    assert token.tolist() == [3, 3]
    assert log_behavior.tolist() == [0.0, 0.0]


def test_a_nucleus_wider_than_the_first_candidates_is_exact() -> None:
    vocabulary, top_p = 1000, 0.9
    logits = torch.zeros(4000, vocabulary)
    logits[:, ::2] += math.log(3)  # 500 tokens of 3/2000, 500 of 1/2000: 0.9 needs all the first and 300 of the others
    token, log_behavior = draw(logits, torch.linspace(0, 1 - 2**-24, 4000), Sampling(top_p=top_p))
    # 0.9 is met exactly: a float32 sum of 1000 terms is right to 1e-5, a fiftieth of a token, so one more or none
    assert len(token.unique()) == pytest.approx(800, abs=1)
    expected = torch.where(token % 2 == 0, 3 / 2000 / top_p, 1 / 2000 / top_p)
    np.testing.assert_allclose(log_behavior.exp(), expected, rtol=2e-3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 200),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999, 1.0]),
)
def test_log_behavior_is_the_sorted_definition_of_the_nucleus(
    seed: int, size: int, temperature: float, top_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, size).astype(np.float32)
    weight = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    probability = weight / weight.sum()
    order = np.argsort(-probability)
    before = np.cumsum(probability[order]) - probability[order]
    kept = order[(before < top_p) | (np.arange(size) == 0)] if top_p < 1 else order
    if top_p < 1 and np.abs(before - top_p).min() < 1e-5:
        return  # float32 may settle the border either way
    uniform = torch.from_numpy(rng.random(64, np.float32))
    token, log_behavior = draw(torch.from_numpy(logits).expand(64, -1), uniform, Sampling(temperature, top_p))
    assert set(token.tolist()) <= set(kept.tolist())
    np.testing.assert_allclose(log_behavior, np.log(probability[token] / probability[kept].sum()), rtol=1e-4, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 200),
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
)
def test_log_behavior_is_that_of_min_p_then_top_k_then_top_p_of_what_they_leave_as_vllm_has_them(
    seed: int, size: int, temperature: float, top_k: int, min_p: float, top_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, size).astype(np.float32)
    weight = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = [i for i in np.argsort(-weight) if weight[i] >= min_p][: top_k or size]
    share = weight[order] / weight[order].sum()
    before = np.cumsum(share) - share
    borders = [
        np.abs(weight - min_p).min() if 0 < min_p < 1 else 1.0,
        np.abs(before - top_p).min() if top_p < 1 else 1.0,
    ]
    if min(borders) < 1e-5:
        return  # float32 may settle the border either way
    kept = [i for i, b in zip(order, before, strict=True) if b < top_p or top_p == 1]
    uniform = torch.from_numpy(rng.random(64, np.float32))
    sampling = Sampling(temperature, top_p, top_k, min_p)
    token, log_behavior = draw(torch.from_numpy(logits).expand(64, -1), uniform, sampling)
    assert set(token.tolist()) <= set(kept)
    np.testing.assert_allclose(log_behavior, np.log(weight[token] / weight[kept].sum()), rtol=1e-4, atol=1e-5)
    assert sampling.full_support == (top_k == 0 and min_p == 0 and top_p == 1)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7), Sampling(1.0, 0.8), Sampling(top_k=5), Sampling(min_p=0.2), Sampling(1.2, 0.9, 6, 0.1)],
    ids=str,
)
def test_frequencies_match_the_probabilities(sampling: Sampling) -> None:
    logits = torch.linspace(-1.5, 1.5, 8)
    n = 200_000
    uniform = torch.from_numpy(np.random.default_rng(0).random(n, np.float32))
    token, log_behavior = draw(logits.expand(n, -1), uniform, sampling)
    seen = token.unique()
    probability = torch.stack([log_behavior[token == t][0].exp() for t in seen])
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)
    expected = probability.double() * n
    observed = torch.bincount(token, minlength=8)[seen]
    chi_square = ((observed - expected).square() / expected).sum().item()
    assert chi_square < 24.3  # the 0.999 quantile at 7 degrees of freedom


def test_log_behavior_is_exact_to_1e_4_over_a_vocabulary_of_32000() -> None:
    logits = torch.randn(16, 32_000, generator=torch.Generator().manual_seed(0)) * 4
    token, log_behavior = draw(logits, torch.linspace(0, 1 - 2**-24, 16), Sampling())
    exact = torch.log_softmax(logits.double(), -1).gather(1, token[:, None])[:, 0]
    np.testing.assert_allclose(log_behavior, exact, atol=1e-4)


def test_an_index_drawn_in_blocks_is_the_index_of_all_cumulative_sums_but_for_rounding() -> None:
    """Of 1,001 weights in blocks of 64, which do not divide them, all multiples of 2^-12: sums are exact."""
    generator = torch.Generator().manual_seed(0)
    weight_RV = torch.randint(0, 64, (300, 1001), generator=generator) / 4096
    weight_RV[0:50, 100:700] = 0.0  # whole blocks without a weight
    weight_RV[50:60] = 0.0
    weight_RV[50:60, 1000] = 0.25  # the last index alone
    for uniform in (0.0, 0.123, 0.5, 1 - 2**-24, 1.0):
        uniform_R = torch.full((300,), uniform)
        index_R1, share_R1 = draw_in_blocks(weight_RV, uniform_R, 64)
        expected_R1, expected_share_R1 = _draw_index(weight_RV, uniform_R)
        assert torch.equal(index_R1, expected_R1)
        assert torch.equal(share_R1, expected_share_R1)
        assert bool((weight_RV.gather(1, index_R1) > 0).all())


def test_what_rounding_does_in_blocks_draws_no_index_without_a_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_RV = torch.softmax(20 * torch.randn(2000, 3000, generator=generator), -1)
    weight_RV[:, ::2] = 0.0
    index_R1, _ = draw_in_blocks(weight_RV, torch.rand(2000, generator=generator), 64)
    assert bool((weight_RV.gather(1, index_R1) > 0).all())
    index_R1, _ = draw_in_blocks(torch.full((1, 3000), math.nan), torch.tensor([0.5]), 64)
    assert 0 <= int(index_R1) < 3000


def test_what_a_look_reads_of_rows_depends_on_its_reach_and_not_on_how_long_completions_are() -> None:
    rules = Rules(torch.zeros(50, dtype=torch.bool))
    for length in (16, 4096):
        rows = DecodingRows(4, length, rules)
        rows.token_RT.copy_(torch.arange(4 * length).view(4, length))
        rows.log_behavior_RT.copy_(-torch.arange(4.0 * length).view(4, length))
        rows.count_R1[:, 0] = torch.tensor([1, 3, 10, length])
        rows.ended_R[2] = True
        progress = rows.progress(4, 5)
        assert progress.shape == (4, 6)
        assert progress[:, 0].tolist() == [0, 0, 1, 0]
        for row, count in enumerate(rows.count_R1[:, 0].tolist()):
            newest = rows.token_RT[row, max(0, count - 5) : count].tolist()
            assert progress[row, -len(newest) :].tolist() == newest
        tokens, log_behavior = rows.completions(torch.tensor([3, 1]), 10)
        assert tokens.tolist() == rows.token_RT[[3, 1], :10].tolist()
        assert log_behavior.tolist() == rows.log_behavior_RT[[3, 1], :10].tolist()
