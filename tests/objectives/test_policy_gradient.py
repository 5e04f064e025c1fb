"""The policy gradient without correction, and how Trajectory Balance relates to it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from objective_cases import per_row, random_batch, slopes
from torch import Tensor

from tba.batch import Batch, collate
from tba.objectives.correction import Correction
from tba.objectives.policy_gradient import Reinforce, proximal_rloo
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.schedules import Constant
from tba.types import Completion, Group, Sampling, StopReason, Trajectory, Version
from toy.engine import TabularEngine, sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask, ideal

K, BETA = 6, Constant(0.3)


def perturbed(task: TabularTask) -> TabularPolicy:
    policy = TabularPolicy(task, 1.0, torch.float64)
    noise = torch.randn(policy.logits_QNV.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    policy.load({name: tensor + 0.5 * noise for name, tensor in policy.weights().items()})
    return policy


def gradient(objective: Objective, policy: TabularPolicy, batch: Batch) -> Tensor:
    loss, _ = objective(policy.evaluate(batch), batch, 1)
    return torch.autograd.grad(loss, policy.logits_QNV)[0]


def sampled(policy: TabularPolicy, sampling: Sampling) -> Batch:
    """K rows of each prompt, from the policy's own weights."""
    engine = TabularEngine(policy.task)
    engine.load(policy.weights(), Version(0, 1))
    return collate(
        sample_groups(policy.task, tabular_prompts(policy.task), K, sampling, np.random.default_rng(0), engine)
    )


def test_on_policy_trajectory_balance_is_reinforce_with_a_mean_baseline_and_k_minus_1_over_k_of_rloo() -> None:
    policy = perturbed(TabularTask())
    batch = sampled(policy, Sampling())
    balance = gradient(TrajectoryBalance(BETA, off_policy="none"), policy, batch)
    for penalised in ("policy", "behavior"):  # on-policy it is the same
        mean = Reinforce(BETA, "mean", penalised)
        leave_one_out = Reinforce(BETA, "leave_one_out", penalised)
        torch.testing.assert_close(gradient(mean, policy, batch), balance, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close((K - 1) / K * gradient(leave_one_out, policy, batch), balance, rtol=1e-5, atol=1e-6)


def test_off_policy_it_is_the_penalty_on_the_current_policy_that_makes_them_equal() -> None:
    policy = perturbed(TabularTask())
    batch = sampled(policy, Sampling(temperature=3.0))
    balance = gradient(TrajectoryBalance(BETA, off_policy="none"), policy, batch)
    of_policy, of_behavior = (
        gradient(Reinforce(BETA, "mean", penalised), policy, batch) for penalised in ("policy", "behavior")
    )
    torch.testing.assert_close(of_policy, balance, rtol=1e-5, atol=1e-6)
    assert (of_behavior - balance).norm() > 0.1 * balance.norm()


def test_the_expected_on_policy_gradient_is_that_of_the_reverse_kl_to_the_ideal_policy() -> None:
    """E[gradient] = (K - 1)/K beta grad KL(pi || pi*), exactly: all groups of K = 2, weighted by their probability."""
    task, beta = TabularTask(symbols=2, length=2, prompts=1), 0.4
    policy, (prompt,) = perturbed(task), tabular_prompts(task)
    alone = [Group.of([_trajectory(task, outcome, 0)]) for outcome in range(task.outcomes)]
    log_policy_O = policy.evaluate(collate(alone)).log_policy_BT.sum(1)
    divergence = (log_policy_O.exp() * (log_policy_O - ideal(task, beta)[task.question(prompt)].log())).sum()
    expected = 0.5 * beta * torch.autograd.grad(divergence, policy.logits_QNV, retain_graph=True)[0]

    pairs = [(i, j) for i in range(task.outcomes) for j in range(task.outcomes)]
    batch = collate([Group.of([_trajectory(task, i, 0), _trajectory(task, j, 1)]) for i, j in pairs])
    probability_G = torch.stack([(log_policy_O[i] + log_policy_O[j]).exp() for i, j in pairs]).detach()
    assert probability_G.sum().item() == pytest.approx(1.0)
    for objective, factor in (
        (TrajectoryBalance(Constant(beta), off_policy="none"), 1.0),
        (Reinforce(Constant(beta)), 2.0),
    ):
        output = policy.evaluate(batch)
        loss, _ = objective(output, batch, 1)
        (slope_BT,) = torch.autograd.grad(loss, output.log_policy_BT, retain_graph=True)
        weighted_BT = slope_BT * (len(pairs) * probability_G[batch.group_B])[:, None]
        mean = torch.autograd.grad(output.log_policy_BT, policy.logits_QNV, weighted_BT)[0]
        torch.testing.assert_close(mean, factor * expected, rtol=1e-5, atol=1e-6)


def _trajectory(task: TabularTask, outcome: int, number: int) -> Trajectory:
    (prompt,) = tabular_prompts(task)
    tokens = np.array(task.tokens(outcome), dtype=np.int32)
    completion = Completion(tokens, "", StopReason.EXTERNAL, (Version(), Version()))
    reference = TabularPolicy(task, 1.0, torch.float64)
    bare = Trajectory(f"{outcome}-{number}", prompt, completion, 0.0, np.zeros(len(tokens), np.float32), Version())
    log_reference = reference.evaluate(collate([Group.of([bare])])).log_policy_BT[0].detach().numpy()
    reward = float(task.rewards_QO[task.question(prompt), outcome])
    return Trajectory(bare.uid, prompt, completion, reward, log_reference.astype(np.float32), Version())


def test_without_a_baseline_a_constant_added_to_every_reward_changes_the_estimate_and_with_one_it_does_not() -> None:
    policy = perturbed(TabularTask())
    batch = sampled(policy, Sampling())
    objectives = [Reinforce(BETA, "none"), Reinforce(BETA, "mean"), Reinforce(BETA, "leave_one_out")]
    before = [gradient(objective, policy, batch) for objective in objectives]
    batch.reward_B.add_(5.0)
    moved = [(gradient(o, policy, batch) - old).norm() / old.norm() for o, old in zip(objectives, before, strict=True)]
    assert moved[0] > 0.5
    assert max(moved[1:]) < 1e-5


def test_penalising_the_behavior_says_that_it_needs_log_behavior() -> None:
    assert Reinforce(BETA, penalised="behavior").needs == {"log_behavior"}
    assert Reinforce(BETA).needs == frozenset()
    task = TabularTask(symbols=2, length=2, prompts=1)
    batch = collate([Group.of([_trajectory(task, 1, 0), _trajectory(task, 2, 1)])])
    with pytest.raises(ValueError, match="needs log_behavior"):
        gradient(Reinforce(BETA, penalised="behavior"), perturbed(task), batch)


def test_proximal_rloo_is_rloo_on_policy_and_leaves_out_rows_that_have_moved_far_enough() -> None:
    batch, log_policy_BT = random_batch()
    assert batch.log_behavior_BT is not None
    proximal, plain = proximal_rloo(BETA), Reinforce(BETA, penalised="behavior")
    on_policy = slopes(proximal, batch, batch.log_behavior_BT)[0]
    torch.testing.assert_close(on_policy, slopes(plain, batch, batch.log_behavior_BT)[0])
    slope_BT, uncorrected = slopes(proximal, batch, log_policy_BT)[0], slopes(plain, batch, log_policy_BT)[0]
    rho_B = (log_policy_BT - batch.log_behavior_BT).sum(1).exp()
    kept_count = 0
    for b, positions in enumerate(per_row(batch)):
        rho, advantage = float(rho_B[b]), -float(uncorrected[b, positions[0]])
        left_out = rho > 1.2 if advantage > 0 else rho < 0.8
        expected = 0.0 if left_out else -rho * advantage
        kept_count += not left_out
        assert slope_BT[b, positions].tolist() == pytest.approx([expected] * len(positions), abs=1e-12)
    assert 0 < kept_count < batch.rows


def test_truncated_weights_make_an_off_policy_expectation_that_of_the_policy_when_none_is_cut() -> None:
    """Sum over all outcomes of mu(y) w(y) A grad log pi = sum of pi(y) A grad log pi, w the sequence's ratio."""
    task = TabularTask(symbols=2, length=2, prompts=1)
    policy, behavior = perturbed(task), TabularPolicy(task, 1.0, torch.float64)
    batch = collate([Group.of([_trajectory(task, outcome, 0)]) for outcome in range(task.outcomes)])
    log_behavior_BT = behavior.evaluate(batch).log_policy_BT.detach()
    batch = replace(batch, log_behavior_BT=log_behavior_BT)
    log_policy_BT = policy.evaluate(batch).log_policy_BT
    expected = torch.autograd.grad(
        -(log_policy_BT.sum(1).exp() * batch.reward_B).sum(), policy.logits_QNV, retain_graph=True
    )[0]
    for correction, equal in ((Correction("truncate", "sequence", cap=100.0), True), (Correction(), False)):
        objective = Reinforce(baseline="none", correction=correction)
        slope_BT, _ = slopes(objective, batch, log_policy_BT.detach())
        weighted_BT = slope_BT * batch.rows * log_behavior_BT.sum(1, keepdim=True).exp()
        (mean,) = torch.autograd.grad(log_policy_BT, policy.logits_QNV, weighted_BT, retain_graph=True)
        assert torch.allclose(mean, expected, rtol=1e-5, atol=1e-7) == equal
