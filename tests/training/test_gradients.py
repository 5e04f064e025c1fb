"""Whichever way a batch is cut, the gradient is the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import (
    BETA,
    TASK,
    Counted,
    LearnedBalance,
    WhitenedPolicyGradient,
    groups_of,
    llama,
    llama_policy,
    tabular_policy_with_heads,
    with_random_heads,
)

from tba.batch import Batch, collate
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.protocols import HEADS, Objective, Policy
from tba.training.gradients import backward
from tba.training.optimizer import OptimizerSettings
from tba.types import Group
from toy.policy import TabularPolicy

RAGGED = [5, 1, 8, 3]
WHOLE = 10**6
ROUNDING = 4e-6  # of a gradient, relative: eps * sqrt(n) of float32, n = 70 tokens through a dozen matrices


def gradient(policy: Policy, objective: Objective, batch: Batch, max_tokens: int) -> tuple[float, Tensor, int]:
    """(loss, flat gradient, forward passes)"""
    for parameter in policy.parameters():
        parameter.grad = None
    counted = Counted(policy)
    loss, _ = backward(counted, objective, batch, 1, max_tokens)
    return float(loss), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]), counted.passes


def largest_group(batch: Batch) -> int:
    return int(batch.prompt_length_G.scatter_add(0, batch.group_B, batch.length_B).max())


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("policy", [llama_policy(), TabularPolicy(TASK)], ids=["llama", "tabular"])
class TestTrajectoryBalance:
    objective = TrajectoryBalance(BETA)
    batch = collate(groups_of(RAGGED))

    def test_micro_batches_of_whole_groups_give_the_gradient_of_one_pass(self, policy: Policy) -> None:
        loss, whole, passes = gradient(policy, self.objective, self.batch, WHOLE)
        loss_by_group, by_group, passes_by_group = gradient(
            policy, self.objective, self.batch, largest_group(self.batch)
        )
        assert passes == 1
        assert 2 <= passes_by_group <= 4
        assert relative(by_group, whole) < ROUNDING
        assert loss_by_group == pytest.approx(loss, rel=ROUNDING)

    def test_groups_larger_than_a_pass_are_split_and_give_the_same_gradient(self, policy: Policy) -> None:
        loss, whole, _ = gradient(policy, self.objective, self.batch, WHOLE)
        loss_sliced, sliced, passes = gradient(policy, self.objective, self.batch, 9)
        assert passes >= 10  # every slice twice
        assert relative(sliced, whole) < ROUNDING
        assert loss_sliced == pytest.approx(loss, rel=ROUNDING)

    def test_averaging_losses_of_split_groups_would_have_given_another_gradient(self, policy: Policy) -> None:
        """The reason for the leaves: log Z of half a group is another log Z."""
        _, whole, _ = gradient(policy, self.objective, self.batch, WHOLE)
        for parameter in policy.parameters():
            parameter.grad = None
        for rows in torch.arange(self.batch.rows).split(2):
            part = self.batch.select(rows)
            loss, _ = self.objective(policy.evaluate(part), part, 1)
            (loss * part.rows / self.batch.rows).backward()
        naive = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        assert relative(naive, whole) > 0.05

    def test_an_objective_over_the_whole_batch_is_exact_in_slices(self, policy: Policy) -> None:
        _, whole, _ = gradient(policy, WhitenedPolicyGradient(), self.batch, WHOLE)
        _, sliced, passes = gradient(policy, WhitenedPolicyGradient(), self.batch, largest_group(self.batch))
        assert passes >= 4
        assert relative(sliced, whole) < 2 * ROUNDING


@pytest.mark.parametrize(
    "policy",
    [tabular_policy_with_heads(), with_random_heads(llama_policy(heads=HEADS))],
    ids=["tabular", "llama"],
)
def test_heads_are_exact_in_slices_and_log_z_of_a_split_group_counts_once(policy: Policy) -> None:
    batch = collate(groups_of(RAGGED))
    _, whole, _ = gradient(policy, LearnedBalance(), batch, WHOLE)
    _, sliced, passes = gradient(policy, LearnedBalance(), batch, 7)
    assert passes >= 10
    assert relative(sliced, whole) < ROUNDING


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    max_tokens=st.integers(1, 60),
    seed=st.integers(0, 2**16),
    separable=st.booleans(),
)
def test_the_gradient_does_not_depend_on_the_size_of_a_pass(
    sizes: list[int], max_tokens: int, seed: int, separable: bool
) -> None:
    policy, batch = TabularPolicy(TASK, dtype=torch.float64), collate(groups_of([*sizes, 3], seed))
    objective: Objective = TrajectoryBalance(BETA) if separable else WhitenedPolicyGradient()
    _, whole, _ = gradient(policy, objective, batch, WHOLE)
    _, cut, _ = gradient(policy, objective, batch, max_tokens)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-12)


def test_a_policy_that_pads_gives_the_same_gradient_in_passes_of_bounded_padded_area() -> None:
    policy, objective, batch = (
        CausalPolicy(llama(), share_prompt=False),
        TrajectoryBalance(BETA),
        collate(groups_of(RAGGED)),
    )
    row_G = batch.prompt_length_G[batch.group_B] + batch.length_B
    loss, whole, _ = gradient(policy, objective, batch, WHOLE)
    for limit in (3 * int(row_G.max()), 8 * int(row_G.max())):  # groups are split; or they fit
        loss_cut, cut, passes = gradient(policy, objective, batch, limit)
        assert passes >= 3
        assert relative(cut, whole) < ROUNDING
        assert loss_cut == pytest.approx(loss, rel=ROUNDING)


@pytest.mark.parametrize("policy", [llama_policy(), CausalPolicy(llama(), share_prompt=False)], ids=["packed", "plain"])
@pytest.mark.parametrize("objective", [TrajectoryBalance(BETA), WhitenedPolicyGradient()])
def test_the_entropy_is_the_mean_over_all_tokens_with_their_repeats_however_a_batch_is_cut(
    policy: CausalPolicy, objective: Objective
) -> None:
    groups = groups_of(RAGGED)
    repeated = [Group.of([*group.trajectories, *2 * [group.trajectories[0]]]) for group in groups]
    batch = collate(repeated)
    expected, plain = [], llama()
    for group in repeated:
        for t in group.trajectories:
            tokens = torch.tensor([*t.prompt.tokens, *t.completion.tokens])
            with torch.no_grad():
                logits_TV = plain(input_ids=tokens[None]).logits[0, len(t.prompt.tokens) - 1 : -1]
            expected += torch.distributions.Categorical(logits=logits_TV).entropy().tolist()
    for limit in (WHOLE, 40, 12):
        _, metrics = backward(policy, objective, batch, 1, limit)
        assert float(metrics["entropy"]) == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_metrics_of_micro_batches_are_those_of_one_pass() -> None:
    policy, batch = TabularPolicy(TASK), collate(groups_of(RAGGED))
    whole, parts = (
        {name: float(value) for name, value in backward(policy, TrajectoryBalance(BETA), batch, 1, limit)[1].items()}
        for limit in (WHOLE, largest_group(batch))
    )
    assert parts == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_makes_no_update_even_where_its_gradient_is(bad: float) -> None:
    for max_tokens in (WHOLE, 20, 9):
        policy, batch = TabularPolicy(TASK), collate(groups_of(RAGGED))
        optimizer, before = OptimizerSettings().start(policy.parameters()), policy.logits_QNV.detach().clone()
        loss, _ = backward(policy, TrajectoryBalance(BETA), batch, 1, max_tokens)
        assert math.isnan(optimizer.step(1, loss + bad))
        assert torch.equal(policy.logits_QNV, before)
        batch.reward_B[:] = bad
        loss, _ = backward(policy, TrajectoryBalance(BETA), batch, 1, max_tokens)
        assert not math.isfinite(loss)
        assert math.isnan(optimizer.step(1, loss))
        assert torch.equal(policy.logits_QNV, before)
