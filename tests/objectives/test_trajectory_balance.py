"""Trajectory Balance against its closed forms, on the enumerable toy (float64)."""

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import floats, per_row, random_batch, slopes
from torch import Tensor

from tba.batch import Batch, collate, micro_batches
from tba.errors import UserError
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective, PolicyOutput
from tba.schedules import Constant, Linear
from tba.types import Completion, Group, Prompt, Sampling, StopReason, Trajectory, Version
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularReference, TabularTask, distribution, ideal

paper = partial(TrajectoryBalance, off_policy="none")
TASK = TabularTask(prompts=4)
SAMPLINGS = [Sampling(0.7), Sampling(1.0), Sampling(1.5), Sampling(1.0, top_p=0.8), Sampling(1e6), Sampling(0.0)]


def perturbed(seed: int = 0, temperature: float = 1.0) -> TabularPolicy:
    """A policy away from its reference."""
    policy = TabularPolicy(TASK, temperature, torch.float64)
    noise = torch.randn(policy.logits_QNV.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    policy.load({name: tensor + 0.5 * noise for name, tensor in policy.weights().items()})
    return policy


def ragged_batch(seed: int = 0, sizes: tuple[int, ...] = (8, 5, 3, 7)) -> Batch:
    rng = np.random.default_rng(seed)
    pairs = zip(tabular_prompts(TASK), sizes, strict=True)
    return collate([sample_groups(TASK, [prompt], size, Sampling(1.5), rng)[0] for prompt, size in pairs])


def gradient(objective: TrajectoryBalance, policy: TabularPolicy, batch: Batch) -> Tensor:
    loss, _ = objective(policy.evaluate(batch), batch, 1)
    return torch.autograd.grad(loss, policy.logits_QNV)[0]


def group_of(prompt: Prompt, outcomes: list[int], temperature: float) -> Group:
    """A group of given outcomes that came from elsewhere."""
    rewards, question = TASK.rewards_QO, TASK.question(prompt)
    completions = [
        Completion(np.array(TASK.tokens(o), dtype=np.int32), "", StopReason.EXTERNAL, (Version(), Version()))
        for o in outcomes
    ]
    references = TabularReference(TASK, temperature).log_probabilities(prompt, completions)
    return Group.of(
        [
            Trajectory(str(n), prompt, c, float(rewards[question, o]), log_reference, Version())
            for n, (o, c, log_reference) in enumerate(zip(outcomes, completions, references, strict=True))
        ]
    )


def test_the_gradient_agrees_with_finite_differences() -> None:
    """Also though log Z is held constant in it: within a whole group the residuals sum to zero."""
    policy, batch = perturbed(), ragged_batch()
    start = policy.logits_QNV.detach().clone()
    for objective in (paper(Constant(0.3)), paper(Constant(0.3), form="raw")):
        analytic = gradient(objective, policy, batch)
        for seed in range(4):
            direction = torch.randn(
                start.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + seed)
            )
            losses = []
            for epsilon in (1e-5, -1e-5):
                policy.load({"prefix.logits": start + epsilon * direction})
                losses.append(objective(policy.evaluate(batch), batch, 1)[0].item())
            policy.load({"prefix.logits": start})
            numeric = (losses[0] - losses[1]) / 2e-5
            assert numeric == pytest.approx((analytic * direction).sum().item(), rel=1e-6)


@pytest.mark.parametrize(("form", "factor"), [("raw", 2 / 0.3), ("advantage", 1.0)])
def test_the_gradient_is_the_papers_advantage_times_the_score(form: str, factor: float) -> None:
    """Raw: -(2 / (B beta)) sum A grad log pi; advantage form: -(1 / B) sum A grad log pi (appendix A)."""
    beta, policy, batch = 0.3, perturbed(), ragged_batch()
    log_policy_B = policy.evaluate(batch).log_policy_BT.sum(1)
    log_ratio = (log_policy_B.detach() - batch.log_reference_BT.sum(1)).numpy()
    reward, group = batch.reward_B.numpy().astype(np.float64), batch.group_B.numpy()
    advantage = np.zeros(batch.rows)
    for g in range(batch.groups):
        of = group == g
        advantage[of] = reward[of] - reward[of].mean() - beta * (log_ratio[of] - log_ratio[of].mean())
    surrogate = -factor * (torch.from_numpy(advantage) * log_policy_B).mean()
    expected = torch.autograd.grad(surrogate, policy.logits_QNV)[0]
    objective = paper(Constant(beta), form="raw" if form == "raw" else "advantage")
    torch.testing.assert_close(gradient(objective, policy, batch), expected, rtol=1e-6, atol=1e-7)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, TASK.outcomes - 1), min_size=1, max_size=9), min_size=4, max_size=4),
    st.sampled_from([0.1, 0.25, 1.0]),
    st.sampled_from([0.7, 1.0, 1.5]),
    st.sampled_from(["raw", "advantage"]),
)
def test_at_the_ideal_policy_loss_and_gradient_are_zero_on_any_multiset_of_samples(
    outcomes: list[list[int]], beta: float, temperature: float, form: str
) -> None:
    policy = TabularPolicy(TASK, temperature, torch.float64)
    policy.become(ideal(TASK, beta, temperature))
    batch = collate([group_of(p, o, temperature) for p, o in zip(tabular_prompts(TASK), outcomes, strict=True)])
    objective = TrajectoryBalance(Constant(beta), form="raw" if form == "raw" else "advantage")
    loss, _ = objective(policy.evaluate(batch), batch, 1)
    assert loss.item() < 1e-11  # (float32 rounding of rewards and reference)^2
    assert gradient(objective, policy, batch).abs().max() < 1e-5
    first_rows = batch.select(torch.arange(len(outcomes[0])))
    _, metrics = objective(policy.evaluate(first_rows), first_rows, 1)
    assert metrics["log_z"] == pytest.approx(log_z(beta, temperature, tabular_prompts(TASK)[0]), abs=1e-5)


def log_z(beta: float, temperature: float, prompt: Prompt) -> float:
    """log Z(x) = log sum_y pi_ref(y|x) exp(r(y; x) / beta), by enumeration."""
    reference_QO = distribution(TabularPolicy(TASK, temperature, torch.float64))
    z_Q = (reference_QO * (torch.from_numpy(TASK.rewards_QO) / beta).exp()).sum(1)
    return float(z_Q[TASK.question(prompt)].log())


def test_one_group_sampled_at_three_temperatures_top_p_and_uniformly_has_zero_loss_at_the_ideal_policy() -> None:
    rng, prompt = np.random.default_rng(0), tabular_prompts(TASK)[:1]
    mixed = [t for s in SAMPLINGS for t in sample_groups(TASK, prompt, 4, s, rng)[0].trajectories]
    batch, policy = collate([Group.of(mixed)]), TabularPolicy(TASK, 1.0, torch.float64)
    objective = TrajectoryBalance(Constant(0.25), form="raw")
    away = objective(policy.evaluate(batch), batch, 1)[0].item()
    policy.become(ideal(TASK, 0.25))
    assert objective(policy.evaluate(batch), batch, 1)[0].item() < 1e-11
    assert away > 0.1


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(23)))
def test_permuting_rows_across_prompts_changes_nothing(order: list[int]) -> None:
    policy, batch, objective = perturbed(), ragged_batch(), TrajectoryBalance(Constant(0.3))
    shuffled = batch.select(torch.tensor(order))
    torch.testing.assert_close(gradient(objective, policy, shuffled), gradient(objective, policy, batch))
    metrics, shuffled_metrics = (floats(objective(policy.evaluate(b), b, 1)[1]) for b in (batch, shuffled))
    assert metrics == pytest.approx(shuffled_metrics, rel=1e-5)


def test_one_prompts_rewards_never_reach_another_prompts_gradient() -> None:
    """Raising all rewards of a prompt moves its log Z alone (a layout that assumes an order of rows mixes prompts)."""
    policy, batch, objective = perturbed(), ragged_batch(sizes=(6, 6, 6, 6)), TrajectoryBalance(Constant(0.3))
    before = gradient(objective, policy, batch)
    first_reward = batch.reward_B.clone()
    batch.reward_B[batch.group_B == 2] += 8.0
    torch.testing.assert_close(gradient(objective, policy, batch), before, rtol=1e-4, atol=1e-6)

    log_ratio_B = (policy.evaluate(batch).log_policy_BT - batch.log_reference_BT).sum(1).detach()
    mixed_log_z = [(r / 0.3 - log_ratio_B).view(6, -1).mean(0).repeat(6) for r in (first_reward, batch.reward_B)]
    assert (mixed_log_z[1] - mixed_log_z[0])[batch.group_B == 0].abs().max() > 1


@pytest.mark.parametrize("max_tokens", [20, 40, 1000])
def test_many_prompts_give_the_same_gradient_at_any_micro_batch_size_of_whole_groups(max_tokens: int) -> None:
    policy, batch, objective = perturbed(), ragged_batch(), TrajectoryBalance(Constant(0.3))
    accumulated, passes = torch.zeros_like(policy.logits_QNV), 0
    for rows in micro_batches(batch, max_tokens, objective.by_group):
        accumulated += len(rows) / batch.rows * gradient(objective, policy, batch.select(rows))
        passes += 1
    torch.testing.assert_close(accumulated, gradient(objective, policy, batch))
    assert passes == {20: 4, 40: 2, 1000: 1}[max_tokens]


@pytest.mark.parametrize("max_tokens", [1, 5, 10, 25])
def test_a_group_split_over_micro_batches_gives_the_same_gradient_by_leaves_then_slices(max_tokens: int) -> None:
    policy, batch, objective = perturbed(), ragged_batch(), TrajectoryBalance(Constant(0.3))
    whole = gradient(objective, policy, batch)
    leaves_BT = policy.evaluate(batch).log_policy_BT.detach().requires_grad_()
    loss, _ = objective(PolicyOutput(leaves_BT), batch, 1)
    (slope_BT,) = torch.autograd.grad(loss, leaves_BT)

    by_slices, naive = torch.zeros_like(whole), torch.zeros_like(whole)
    for rows in micro_batches(batch, max_tokens, by_group=False):
        part = batch.select(rows)
        log_policy_BT = policy.evaluate(part).log_policy_BT
        slice_BT = slope_BT[rows, : log_policy_BT.shape[1]]
        by_slices += torch.autograd.grad(log_policy_BT, policy.logits_QNV, slice_BT)[0]
        naive += len(rows) / batch.rows * gradient(objective, policy, part)
    torch.testing.assert_close(by_slices, whole)
    assert (naive - whole).abs().max() > 0.05 * whole.abs().max()  # why the slices are needed


def test_holding_log_z_constant_does_not_matter_while_the_group_is_whole() -> None:
    beta, policy, batch = 0.3, perturbed(), ragged_batch()
    gap_B = batch.reward_B / beta - (policy.evaluate(batch).log_policy_BT - batch.log_reference_BT).sum(1)
    residuals = [gap_B[batch.group_B == g] - gap_B[batch.group_B == g].mean() for g in range(batch.groups)]
    through_log_z = torch.autograd.grad(torch.cat(residuals).square().mean(), policy.logits_QNV)[0]
    objective = paper(Constant(beta), form="raw")
    torch.testing.assert_close(gradient(objective, policy, batch), through_log_z, rtol=1e-6, atol=1e-6)


def test_at_the_reference_the_advantage_form_has_the_same_gradient_for_every_beta_and_the_raw_form_2_over_beta() -> (
    None
):
    policy, batch = TabularPolicy(TASK, 1.0, torch.float64), ragged_batch()
    expected = gradient(TrajectoryBalance(Constant(1.0)), policy, batch)
    for beta in (0.004, 0.05, 0.3, 2.0):
        advantage = gradient(TrajectoryBalance(Constant(beta)), policy, batch)
        raw = gradient(TrajectoryBalance(Constant(beta), form="raw"), policy, batch)
        torch.testing.assert_close(advantage, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(raw, advantage * 2 / beta, rtol=1e-9, atol=1e-12)


def test_a_group_of_one_contributes_nothing_and_is_counted() -> None:
    policy, objective = perturbed(), TrajectoryBalance(Constant(0.3))
    with_lone, without = ragged_batch(sizes=(8, 1, 3, 1)), None
    without = with_lone.select(torch.tensor([b for b in range(13) if b not in (8, 12)]))
    torch.testing.assert_close(
        13 * gradient(objective, policy, with_lone), 11 * gradient(objective, policy, without), rtol=1e-6, atol=1e-9
    )
    assert objective(policy.evaluate(with_lone), with_lone, 1)[1]["degenerate"] == pytest.approx(2 / 13)


def test_tokens_the_policy_did_not_sample_count_for_nothing() -> None:
    """Whatever the model says of padding, or of positions that someone else wrote."""
    batch, policy, objective = ragged_batch(), perturbed(), TrajectoryBalance(Constant(0.3))
    log_policy_BT = policy.evaluate(batch).log_policy_BT.detach()
    loss, _ = objective(PolicyOutput(log_policy_BT), batch, 1)
    garbage_BT = torch.where(batch.mask_BT, log_policy_BT, torch.nan).requires_grad_()
    same, _ = objective(PolicyOutput(garbage_BT), batch, 1)
    (slope_BT,) = torch.autograd.grad(same, garbage_BT)
    assert same.item() == loss.item()
    assert not batch.mask_BT.all()
    assert not slope_BT[~batch.mask_BT].any()
    assert (slope_BT[batch.mask_BT] != 0).all()


def test_metrics_are_means_over_rows() -> None:
    batch, policy = ragged_batch(), perturbed()
    objective = paper(Linear(0.6, 0.2, 10))
    loss, found = objective(policy.evaluate(batch), batch, 6)
    metrics = floats(found)
    log_ratio_B = (policy.evaluate(batch).log_policy_BT - batch.log_reference_BT).sum(1)
    assert metrics["beta"] == pytest.approx(0.4)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["log_ratio"] == pytest.approx(log_ratio_B.mean().item(), rel=1e-5)
    assert metrics["log_z"] == pytest.approx((batch.reward_B / 0.4 - log_ratio_B).mean().item(), rel=1e-5)
    assert metrics["group_size"] == pytest.approx((64 + 25 + 9 + 49) / 23)
    parts = [batch.select(rows) for rows in micro_batches(batch, 40)]
    combined = [floats(objective(policy.evaluate(part), part, 6)[1]) for part in parts]
    for name, value in metrics.items():
        mean = sum(part.rows * m[name] for part, m in zip(parts, combined, strict=True)) / batch.rows
        assert mean == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("beta", [Constant(0.0), Constant(-0.1), Linear(0.1, 0.0, 10)])
def test_a_beta_that_reaches_zero_is_refused(beta: Constant | Linear) -> None:
    with pytest.raises(UserError, match="stays above 0"):
        TrajectoryBalance(beta)


@given(t=st.floats(0.5, 3.0), g=st.floats(0.5, 3.0))
@settings(max_examples=15, deadline=None)
def test_the_tempered_target_has_zero_loss_and_nothing_else_near_it_has(t: float, g: float) -> None:
    """log pi* + log Z = (log pi_ref / g + r / beta) / T, on any sample of it; at T = g = 1 it is the usual one."""
    objective = TrajectoryBalance(
        Constant(0.7), reward_temperature=Linear(t, 1.0, 4), reference_temperature=Constant(g)
    )
    rng = np.random.default_rng(0)
    batch = collate(sample_groups(TASK, tabular_prompts(TASK), 9, Sampling(1.5), rng))
    reference_B = (batch.log_reference_BT * batch.mask_BT).sum(1)

    def loss(step: int, off: float = 0.0) -> float:
        hot = objective.reward_temperature(step)
        wanted_B = (reference_B / g + batch.reward_B / 0.7) / hot - 3.21
        wanted_B = wanted_B + off * torch.arange(batch.rows)
        log_policy_BT = torch.zeros_like(batch.log_reference_BT)
        log_policy_BT[:, 0] = wanted_B  # only the sum over an answer matters
        return float(objective(PolicyOutput(log_policy_BT * batch.mask_BT), batch, step)[0])

    for step in (1, 3, 9):
        assert loss(step) == pytest.approx(0, abs=1e-8)
        assert loss(step, off=0.1) > 1e-4


def test_temperatures_of_the_target_have_to_stay_above_0() -> None:
    for name in ("reward_temperature", "reference_temperature"):
        with pytest.raises(UserError, match=name):
            TrajectoryBalance(Constant(1.0), **{name: Linear(1.0, 0.0, 3)})


Treatment = Literal["asymmetric", "exact", "tapered"]
TREATMENTS: tuple[Treatment, ...] = ("asymmetric", "exact", "tapered")


def far_batch(seed: int, far: float) -> tuple[Batch, Tensor]:
    """A batch and a policy that is so many times as far from the behaviour as `random_batch`'s."""
    batch, log_policy_BT = random_batch(seed)
    assert batch.log_behavior_BT is not None
    batch = replace(batch, reward_B=3 * batch.reward_B)  # so that what the policy has lost is not always the better
    return batch, batch.log_behavior_BT + far * (log_policy_BT - batch.log_behavior_BT) - 0.2


def by_hand(treatment: str, batch: Batch, log_policy_BT: Tensor, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """(weights, residuals) [B] from the docstring's equations, in plain loops."""
    assert batch.log_behavior_BT is not None
    positions, group = per_row(batch), batch.group_B.numpy()

    def total(x_BT: Tensor) -> np.ndarray:
        return np.array([float(x_BT[b, p].sum()) for b, p in enumerate(positions)])

    log_rho = total(log_policy_BT) - total(batch.log_behavior_BT)
    gap = batch.reward_B.numpy() / beta - (total(log_policy_BT) - total(batch.log_reference_BT))
    weight, residual = np.zeros(batch.rows), np.zeros(batch.rows)
    for g in range(batch.groups):
        of = np.flatnonzero(group == g)
        scale = min(1.0, 2.0 / np.std(log_rho[of]))
        for b in of:
            rho, worse = math.exp(scale * log_rho[b]), gap[b] <= gap[of].mean()
            weight[b] = min(rho, 8.0) if treatment != "tapered" else min(rho, 1.0) if worse else 1.0
        weight[of] /= weight[of].mean()
        log_z = np.average(gap[of], weights=weight[of])
        residual[of] = gap[of] - log_z
    return weight, residual


@pytest.mark.parametrize("far", [1.0, 4.0])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_the_slope_of_a_row_is_its_weight_times_its_residual_from_log_z(treatment: Treatment, far: float) -> None:
    batch, log_policy_BT = far_batch(7, far)
    weight, residual = by_hand(treatment, batch, log_policy_BT, 0.3)
    slope_BT, _ = slopes(TrajectoryBalance(Constant(0.3), off_policy=treatment), batch, log_policy_BT)
    for b, positions in enumerate(per_row(batch)):
        expected = -0.3 * weight[b] * residual[b] / batch.rows
        assert slope_BT[b, positions].tolist() == pytest.approx([expected] * len(positions), rel=1e-9, abs=1e-12)
    assert weight.max() - weight.min() > 0.2


@pytest.mark.parametrize("treatment", ["exact", "tapered"])
def test_weighted_too_a_group_is_pushed_up_as_much_as_down_and_more_up_in_a_run_of_the_default(
    treatment: Treatment,
) -> None:
    batch, log_policy_BT = far_batch(8, 1.0)
    assert bool(batch.mask_BT[:, 0].all())
    likely_B = (log_policy_BT.exp() * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
    batch = replace(batch, reward_B=10 * likely_B)  # what the policy seldom gives is worse

    def pushes(objective: Objective, step: int) -> list[float]:
        leaf_BT = log_policy_BT.clone().requires_grad_()
        loss, _ = objective(PolicyOutput(leaf_BT), batch, step)
        push_B = torch.autograd.grad(loss, leaf_BT)[0][:, 0]
        return [float(push_B[batch.group_B == g].sum()) for g in range(batch.groups)]

    even = pytest.approx([0] * batch.groups, abs=1e-12)
    run = TrajectoryBalance(Constant(0.3)).start()
    assert pushes(TrajectoryBalance(Constant(0.3), off_policy=treatment), 1) == even
    assert pushes(run, 1) == even
    assert max(pushes(run, 2)) < -0.01


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_where_no_behaviour_is_known_it_is_the_papers_form(treatment: Treatment) -> None:
    batch, log_policy_BT = random_batch(9)
    unknown = replace(batch, log_behavior_BT=None)
    objectives = TrajectoryBalance(Constant(0.3), off_policy=treatment), paper(Constant(0.3))
    slope_BT, expected_BT = (slopes(o, unknown, log_policy_BT)[0] for o in objectives)
    torch.testing.assert_close(slope_BT, expected_BT, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("treatment", ["exact", "tapered"])
def test_on_policy_it_is_the_papers_form(treatment: Treatment) -> None:
    batch, _ = random_batch(9)
    assert batch.log_behavior_BT is not None
    objectives = TrajectoryBalance(Constant(0.3), off_policy=treatment), paper(Constant(0.3))
    slope_BT, expected_BT = (slopes(o, batch, batch.log_behavior_BT)[0] for o in objectives)
    torch.testing.assert_close(slope_BT, expected_BT, rtol=1e-12, atol=1e-15)


def test_a_row_of_unknown_behaviour_weighs_as_if_the_policy_had_sampled_it() -> None:
    batch, log_policy_BT = far_batch(10, 1.0)
    assert batch.log_behavior_BT is not None
    row = torch.arange(batch.rows) == 4
    full_batch = replace(batch, log_behavior_BT=torch.where(row[:, None], log_policy_BT, batch.log_behavior_BT))
    some_BT = torch.where(row[:, None], math.nan, batch.log_behavior_BT)
    partly = replace(batch, log_behavior_BT=None, some_behavior_BT=some_BT)
    slope_BT, expected_BT = (
        slopes(TrajectoryBalance(Constant(0.3)), data, log_policy_BT)[0] for data in (partly, full_batch)
    )
    torch.testing.assert_close(slope_BT, expected_BT, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_answers_that_the_policy_has_all_but_lost_still_have_finite_weights_of_mean_1(treatment: Treatment) -> None:
    batch, log_policy_BT = random_batch(11)
    objective = TrajectoryBalance(Constant(0.3), off_policy=treatment)
    for off in (-1e4, 1e4):
        loss, metrics = objective(PolicyOutput(log_policy_BT + off), batch, 1)
        assert math.isfinite(float(loss))
        assert 1 / 4 <= metrics["weight_ess"] <= 1 + 1e-6
        if treatment not in ("none", "tapered"):
            assert metrics["cut"] == (off > 0)  # of rows: a ratio is cut above, never below
