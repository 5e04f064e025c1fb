"""Sums over positions and means over groups, against plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.objectives.reduce import (
    average,
    group_max,
    group_mean,
    group_sizes,
    group_std,
    leave_one_out_mean,
    masked_sum,
    row_means,
    token_mean,
    whitened,
)

rows_of_groups = st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100)), min_size=1, max_size=20)


@settings(deadline=None)
@given(rows_of_groups)
def test_means_over_a_group_are_those_of_a_plain_loop_whatever_the_order_of_the_rows(
    rows: list[tuple[int, float]],
) -> None:
    group_B = torch.tensor([g for g, _ in rows])
    x_B = torch.tensor([x for _, x in rows], dtype=torch.float64)
    mean_B, others_B = group_mean(x_B, group_B, 5), leave_one_out_mean(x_B, group_B, 5)
    std_B, max_B = group_std(x_B, group_B, 5), group_max(x_B, group_B, 5)
    for b, (g, x) in enumerate(rows):
        group_values = [y for h, y in rows if h == g]
        other_values = [y for c, (h, y) in enumerate(rows) if h == g and c != b]
        assert int(group_sizes(group_B, 5)[b]) == len(group_values)
        np.testing.assert_allclose(mean_B[b], np.mean(group_values), atol=1e-10)
        np.testing.assert_allclose(others_B[b], np.mean(other_values) if other_values else x, atol=1e-10)
        np.testing.assert_allclose(std_B[b], np.std(group_values, ddof=1) if other_values else 0, atol=1e-6)
        assert float(max_B[b]) == max(group_values)


def test_the_mean_baseline_is_k_minus_1_over_k_of_the_leave_one_out_baseline() -> None:
    x_B = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    group_B = torch.arange(24) % 3  # groups of 8, interleaved
    by_mean, by_others = x_B - group_mean(x_B, group_B, 3), x_B - leave_one_out_mean(x_B, group_B, 3)
    torch.testing.assert_close(by_mean, 7 / 8 * by_others)


def test_gradients_flow_through_means_over_groups() -> None:
    x_B = torch.randn(7, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    group_B = torch.tensor([0, 2, 2, 1, 0, 2, 1])
    for reduce in (group_mean, leave_one_out_mean):
        assert torch.autograd.gradcheck(lambda x, reduce=reduce: reduce(x, group_B, 3), (x_B,))


def test_positions_outside_the_mask_are_ignored_even_if_they_are_not_finite() -> None:
    x_BT = torch.tensor([[1.0, 2.0, torch.nan], [3.0, -torch.inf, torch.inf]], requires_grad=True)
    sum_B = masked_sum(x_BT, torch.tensor([[True, True, False], [True, False, False]]))
    sum_B.sum().backward()
    assert sum_B.tolist() == [3.0, 3.0]
    assert x_BT.grad is not None
    assert x_BT.grad.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_row_means_of_micro_batches_combine_by_their_numbers_of_rows() -> None:
    x_B, alone_B = torch.arange(10.0), torch.arange(10) < 3
    whole = row_means(x=x_B, alone=alone_B)
    parts = [(n, row_means(x=x, alone=a)) for n, x, a in ((4, x_B[:4], alone_B[:4]), (6, x_B[4:], alone_B[4:]))]
    for name in whole:
        np.testing.assert_allclose(sum(n * part[name] for n, part in parts) / 10, whole[name], rtol=1e-6)
    assert whole == {"x": 4.5, "alone": np.float32(0.3)}


X_BT = torch.tensor([[1.0, 2.0, torch.nan], [4.0, 8.0, 16.0], [torch.inf, torch.nan, 5.0]])
MASK_BT = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])


def test_a_sum_over_positions_is_divided_by_rows_by_tokens_of_each_row_or_by_all_tokens() -> None:
    assert float(average(X_BT, MASK_BT, "row")) == pytest.approx((3 + 20 + 0) / 3)
    assert float(average(X_BT, MASK_BT, "sequence")) == pytest.approx((3 / 2 + 20 / 2 + 0) / 3)
    assert float(average(X_BT, MASK_BT, "token")) == pytest.approx((3 + 20) / 4)
    assert token_mean(X_BT, MASK_BT).tolist() == [1.5, 10.0, 0.0]


def test_whitened_numbers_have_mean_0_and_variance_1_over_all_sampled_positions() -> None:
    white_BT = whitened(X_BT, MASK_BT)
    sampled_values = white_BT[MASK_BT].numpy()
    np.testing.assert_allclose([sampled_values.mean(), sampled_values.std()], [0, 1], atol=1e-6)
    np.testing.assert_allclose(np.diff(sampled_values) / np.diff(sampled_values)[0], np.diff([1, 2, 4, 16]), rtol=1e-5)
    assert white_BT[~MASK_BT].tolist() == [0.0] * 5
    assert whitened(X_BT, torch.zeros_like(MASK_BT)).abs().sum() == 0  # nothing was sampled
