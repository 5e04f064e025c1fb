"""Sub-trajectory balance: zero at the ideal policy and its values, exact against a plain double loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import TASK, finite_differences, gradient, perturbed, random_batch, sampled, slopes

from tba.errors import UserError
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import HEADS, PolicyOutput
from tba.schedules import Constant
from toy.policy import TabularPolicy, TabularTask, distribution, ideal

STEEP = 0.25
BETA = Constant(STEEP)


def ideal_policy(task: TabularTask) -> TabularPolicy:
    """pi*, with V*(s) = beta log E[exp(r / beta) | s] under the reference and log Z = V*(no tokens) / beta."""
    policy = TabularPolicy(task, 1.0, torch.float64, HEADS)
    policy.become(ideal(task, STEEP))
    reference_QO = distribution(TabularPolicy(task, 1.0, torch.float64))
    n, a = task.nodes, task.symbols
    mass_QO = torch.stack([reference_QO, reference_QO * (torch.from_numpy(task.rewards_QO) / STEEP).exp()])
    under_QN = mass_QO[:, :, :n].clone()  # "node, then EOS"; deepest first, what lies under each node is added
    inner = torch.cat([under_QN, mass_QO[:, :, n:]], 2)
    for node in range(n - 1, -1, -1):
        inner[:, :, node] += inner[:, :, node * a + 1 : node * a + 1 + a].sum(2)
    value_QN = STEEP * (inner[1, :, :n] / inner[0, :, :n]).log()
    with torch.no_grad():
        (value,), (log_z,) = policy.heads["value"].parameters(), policy.heads["log_z"].parameters()
        value.copy_(value_QN.reshape(-1, 1))
        log_z.copy_(value_QN[:, :1] / STEEP)
    return policy


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    lam=st.sampled_from([0.2, 0.9, 1.0]),
)
def test_at_the_ideal_policy_and_its_values_loss_and_gradient_are_zero_on_any_samples(
    sizes: list[int], seed: int, lam: float
) -> None:
    policy, batch = ideal_policy(TASK), sampled(perturbed(seed), sizes, 2.0, seed)
    for objective in (SubtrajectoryBalance(BETA, lam), TrajectoryBalance(BETA, log_z="learned")):
        loss, _ = objective(policy.evaluate(batch), batch, 1)
        assert loss.item() < 1e-11
        assert gradient(objective, policy, batch).abs().max() < 1e-5


@pytest.mark.parametrize("lam", [0.2, 0.9, 1.0])
def test_away_from_the_ideal_policy_the_loss_is_not_zero(lam: float) -> None:
    batch = sampled(perturbed(0), [6, 6, 6], 2.0, 0)  # of one answer alone it may be, by chance
    for objective in (SubtrajectoryBalance(BETA, lam), TrajectoryBalance(BETA, log_z="learned")):
        away, _ = objective(perturbed().evaluate(batch), batch, 1)
        assert away.item() > 1e-2


@pytest.mark.parametrize("lam", [1.0, 0.6])
def test_the_loss_is_the_weighted_mean_over_all_pairs_of_prefixes(lam: float) -> None:
    batch, log_policy_BT = random_batch()
    value_BT = torch.randn(log_policy_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loss, _ = SubtrajectoryBalance(BETA, lam)(PolicyOutput(log_policy_BT, value_BT * batch.mask_BT), batch, 1)
    total = 0.0
    for b in range(batch.rows):
        length = int(batch.length_B[b])
        level, states = [], []  # beta log-ratio so far less the value, at each state
        so_far = 0.0
        for t in range(length):
            if batch.mask_BT[b, t]:
                level.append(STEEP * so_far - float(value_BT[b, t]))
                states.append(t)
                so_far += float(log_policy_BT[b, t] - batch.log_reference_BT[b, t])
        level.append(STEEP * so_far - float(batch.reward_B[b]))
        states.append(length)
        pairs = [(i, j) for j in range(len(level)) for i in range(j)]
        weights = [lam ** (states[j] - states[i]) for i, j in pairs]
        squares = [(level[j] - level[i]) ** 2 for i, j in pairs]
        total += sum(w * s for w, s in zip(weights, squares, strict=True)) / sum(weights) / (2 * STEEP) / batch.rows
    assert loss.item() == pytest.approx(total, rel=1e-10)


def test_the_gradients_of_policy_and_heads_agree_with_finite_differences() -> None:
    batch = sampled(perturbed(1), [5, 1, 4], 1.5)
    for objective in (
        SubtrajectoryBalance(BETA, 0.7),
        TrajectoryBalance(BETA, log_z="learned", off_policy="none"),
        TrajectoryBalance(BETA, "raw", "learned", "none"),
    ):
        for seed in range(3):
            numeric, analytic = finite_differences(objective, perturbed(), batch, seed)
            assert numeric == pytest.approx(analytic, rel=1e-6)


def test_answers_of_one_token_have_the_whole_as_their_only_stretch_which_is_learned_trajectory_balance() -> None:
    task = TabularTask(symbols=5, length=1, prompts=2)
    policy, batch = perturbed(task=task), sampled(perturbed(1, task=task), [6, 4])
    output = policy.evaluate(batch)
    assert output.value_BT is not None
    assert output.log_z_G is not None
    with torch.no_grad():
        value_BT = STEEP * output.log_z_G[batch.group_B][:, None]
    slope_BT, at_value = slopes(SubtrajectoryBalance(BETA), batch, output.log_policy_BT.detach(), value_BT)
    leaves = [output.log_policy_BT.detach().requires_grad_(), output.log_z_G.detach().requires_grad_()]
    loss, _ = TrajectoryBalance(BETA, log_z="learned", off_policy="none")(
        PolicyOutput(leaves[0], None, leaves[1]), batch, 1
    )
    expected_BT, at_log_z = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(slope_BT, expected_BT)
    summed = torch.zeros(2, dtype=torch.float64).index_add(0, batch.group_B, STEEP * at_value[:, 0])
    torch.testing.assert_close(summed, at_log_z)  # V = beta log Z


def test_both_learn_the_ideal_policy_their_values_and_log_z_from_uniformly_random_data() -> None:
    """A small task, no group needed: one answer of each prompt's is a group of one."""
    task = TabularTask(symbols=2, length=2, prompts=1)
    star = ideal_policy(task)
    data = sampled(TabularPolicy(task, 1.0, torch.float64), [1] * 64, 1e6)
    for objective in (SubtrajectoryBalance(BETA, 0.9), TrajectoryBalance(BETA, log_z="learned")):
        policy = TabularPolicy(task, 1.0, torch.float64, HEADS)
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
        for step in range(400):
            optimizer.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 400))
            optimizer.zero_grad()
            objective(policy.evaluate(data), data, step + 1)[0].backward()
            optimizer.step()
        assert (distribution(policy) - distribution(star)).abs()[:1].sum() / 2 < 0.01
        output, ideal = policy.evaluate(data), star.evaluate(data)
        if "value" in objective.needs:
            torch.testing.assert_close(output.value_BT, ideal.value_BT, rtol=0, atol=0.01)
        else:
            torch.testing.assert_close(output.log_z_G, ideal.log_z_G, rtol=0, atol=0.04)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="Sub-trajectory balance divides by beta"):
        SubtrajectoryBalance(Constant(0.0))
    for lam in (0.0, 1.1):
        with pytest.raises(UserError, match="has to be above 0, at most 1"):
            SubtrajectoryBalance(BETA, lam)
