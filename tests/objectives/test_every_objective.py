"""What is true of every objective, whatever its equation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import OBJECTIVES, floats, gradient, perturbed, sampled

from tba.protocols import HEADS, TOP_TOKENS, Objective
from tba.training.gradients import backward

named = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
sizes_of_groups = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@named
@settings(deadline=None, max_examples=15)
@given(sizes=sizes_of_groups, seed=st.integers(0, 2**16), holes=st.sampled_from([0.0, 0.3]))
def test_the_order_of_the_rows_changes_nothing(objective: Objective, sizes: list[int], seed: int, holes: float) -> None:
    policy = perturbed(seed)
    batch = sampled(perturbed(seed, 0.7), sizes, 1.3, seed, holes)
    order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(seed))
    moved = batch.select(order)
    loss, metrics = objective(policy.evaluate(batch), batch, 1)
    loss_moved, metrics_moved = objective(policy.evaluate(moved), moved, 1)
    torch.testing.assert_close(loss_moved, loss, rtol=1e-9, atol=1e-11)
    assert floats(metrics_moved) == pytest.approx(floats(metrics), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(
        gradient(objective, policy, moved), gradient(objective, policy, batch), rtol=1e-9, atol=1e-11
    )


@named
@settings(deadline=None, max_examples=15)
@given(
    sizes=sizes_of_groups, seed=st.integers(0, 2**16), max_tokens=st.integers(1, 60), holes=st.sampled_from([0.0, 0.3])
)
def test_the_gradient_is_the_same_however_the_batch_is_cut(
    objective: Objective, sizes: list[int], seed: int, max_tokens: int, holes: float
) -> None:
    policy = perturbed(seed)
    batch = sampled(perturbed(seed, 0.7), [*sizes, 3], 1.3, seed, holes)
    whole = gradient(objective, policy, batch)
    loss, metrics = objective(policy.evaluate(batch), batch, 1)
    cut_loss, cut_metrics = backward(policy, objective, batch, 1, max_tokens)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    torch.testing.assert_close(torch.cat([g.flatten() for g in grads]), whole, rtol=1e-8, atol=1e-10)
    assert cut_loss == pytest.approx(loss.item(), rel=1e-6, abs=1e-9)
    assert {name: cut_metrics[name] for name in metrics} == pytest.approx(floats(metrics), rel=1e-4, abs=1e-6)


@named
def test_a_row_of_which_nothing_was_sampled_leaves_loss_and_gradient_finite(objective: Objective) -> None:
    policy, batch = perturbed(), sampled(perturbed(1), [4, 3], 1.3)
    mask_BT = batch.mask_BT.clone()
    mask_BT[1] = False
    assert batch.log_behavior_BT is not None
    emptied = replace(
        batch,
        mask_BT=mask_BT,
        log_reference_BT=batch.log_reference_BT * mask_BT,
        log_behavior_BT=batch.log_behavior_BT * mask_BT,
    )
    loss, metrics = objective(policy.evaluate(emptied), emptied, 1)
    assert all(math.isfinite(value) for value in [loss.item(), *metrics.values()])
    gradients = gradient(objective, policy, emptied)
    assert bool(gradients.isfinite().all())
    assert gradients.abs().max() > 0


@named
def test_ratios_that_would_overflow_leave_the_gradient_finite(objective: Objective) -> None:
    """Rows on which the policy has moved by hundreds of nats from what sampled them."""
    policy, batch = perturbed(), sampled(perturbed(1), [4, 3], 1.3)
    assert batch.log_behavior_BT is not None
    far = replace(batch, log_behavior_BT=torch.where(batch.mask_BT, batch.log_behavior_BT - 300, 0.0))
    assert math.isfinite(objective(policy.evaluate(far), far, 1)[0].item())
    assert bool(gradient(objective, policy, far).isfinite().all())


@named
def test_what_an_objective_needs_is_what_it_misses_when_it_is_not_there(objective: Objective) -> None:
    policy, batch = perturbed(), sampled(perturbed(1), [4, 3])
    output = policy.evaluate(batch)
    without = {
        "log_behavior": (output, replace(batch, log_behavior_BT=None)),
        "step_value": (output, replace(batch, step_start_BS=None, step_value_BS=None)),
        "teacher_top": (output, replace(batch, log_top_BTC=None)),
        "value": (replace(output, value_BT=None), batch),
        "log_z": (replace(output, log_z_G=None), batch),
    }
    assert objective.needs <= without.keys() == HEADS | {"log_behavior", "step_value", TOP_TOKENS}
    for name, (given_output, given_batch) in without.items():
        if name in objective.needs:
            with pytest.raises(ValueError, match=f"needs {name}"):
                objective(given_output, given_batch, 1)
        else:
            objective(given_output, given_batch, 1)
