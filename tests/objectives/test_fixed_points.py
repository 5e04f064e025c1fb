"""Where objectives settle, exactly: expected gradients over all groups there are, with nothing sampled.

Answers are one token of seven, groups are of three. `fresh`: three draws of the policy. `distinct`: draws until three
differ, as the buffer keeps them. `by_reward`: three draws in proportion to pi exp(r), as selection by reward among many
fresh answers. The ratio to the behaviour is 1 throughout.

Shape legend: O outcomes, G groups, B rows (G x K), T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, permutations
from math import factorial, prod

import numpy as np
import pytest
import torch
from torch import Tensor

from tba.batch import Batch, collate
from tba.objectives.grpo import Grpo, dr_grpo
from tba.objectives.penalty import k3
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.schedules import Constant, WarmupCosine
from tba.types import Group, Sampling
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask, distribution, ideal, total_variation

TASK = TabularTask(symbols=6, length=1, prompts=1)
BETA = 0.25
K = 3
OUTCOMES = range(TASK.outcomes)
REPEATING, DIFFERENT = list(combinations_with_replacement(OUTCOMES, K)), list(combinations(OUTCOMES, K))

TB, TBA_PRIME, RLOO = TrajectoryBalance(Constant(BETA)), TbaPrime(Constant(BETA)), Reinforce(Constant(BETA))
REINFORCE, GRPO, DR_GRPO = Reinforce(Constant(BETA), "none"), Grpo(Constant(BETA)), dr_grpo(Constant(BETA))

Chances = Callable[[Tensor], tuple[list[tuple[int, ...]], Tensor]]  # pi_O -> (groups, the probability of each)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fresh(pi_O: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
    orders_G = [factorial(K) // prod(factorial(g.count(o)) for o in set(g)) for g in REPEATING]
    return REPEATING, pi_O[torch.tensor(REPEATING)].prod(1) * torch.tensor(orders_G)


def distinct(pi_O: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
    orders_GPK = torch.tensor([list(permutations(g)) for g in DIFFERENT])
    p_GPK = pi_O[orders_GPK]
    left_GPK = 1 - (p_GPK.cumsum(-1) - p_GPK)
    return DIFFERENT, (p_GPK / left_GPK).prod(-1).sum(-1)


def by_reward(pi_O: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
    drawn_O = pi_O * torch.from_numpy(TASK.rewards_QO[0]).exp().to(pi_O.dtype)
    return fresh(drawn_O / drawn_O.sum())


def batch_of(groups: list[tuple[int, ...]]) -> Batch:
    """These groups, whole; each answer as the engine and the reward give it."""
    rng = np.random.default_rng(0)
    sampled = sample_groups(TASK, tabular_prompts(TASK), 200, Sampling(temperature=1e6), rng)[0].trajectories
    by_outcome = {TASK.outcome(t.completion.tokens): t for t in sampled}
    assert sorted(by_outcome) == list(OUTCOMES)
    return collate([Group(tuple(by_outcome[o] for o in group)) for group in groups])


def expected_gradient(objective: Objective, policy: TabularPolicy, batch: Batch, chance_G: Tensor) -> float:
    """Leaves the gradient of the expected loss in the policy's parameters; its largest entry."""
    output = policy.evaluate(batch)
    log_policy_BT = output.log_policy_BT.detach().requires_grad_()
    on_policy = replace(batch, log_behavior_BT=output.log_policy_BT.detach())
    loss, _ = objective(replace(output, log_policy_BT=log_policy_BT), on_policy, 1)
    (slope_BT,) = torch.autograd.grad(loss, log_policy_BT)
    weight_B = (chance_G * len(chance_G))[batch.group_B]
    (parameter,) = policy.parameters()
    parameter.grad = None
    (weight_B[:, None] * slope_BT * output.log_policy_BT).sum().backward()
    assert parameter.grad is not None
    return float(parameter.grad.abs().max())


def at_ideal() -> TabularPolicy:
    """A policy that is pi*."""
    policy = TabularPolicy(TASK)
    with torch.no_grad():
        for q, pi_O in enumerate(torch.as_tensor(ideal(TASK, BETA))):
            next(iter(policy.parameters()))[q, 0] = pi_O.log()
    return policy


def settled(objective: Objective, source: Chances, steps: int = 400) -> float:
    """How far (total variation) the policy is from pi* when it has followed the expected gradient to its end."""
    policy = TabularPolicy(TASK)
    optimizer, rate = torch.optim.Adam(policy.parameters()), WarmupCosine(steps)
    groups, _ = source(distribution(policy)[0].detach())
    batch = batch_of(groups)
    for step in range(1, steps + 1):
        _, chance_G = source(distribution(policy)[0].detach())
        expected_gradient(objective, policy, batch, chance_G)
        optimizer.param_groups[0]["lr"] = 0.1 * rate(step)
        optimizer.step()
    return float(total_variation(distribution(policy), ideal(TASK, BETA))[0])


@pytest.mark.parametrize("objective", [TB, TBA_PRIME, RLOO, dr_grpo(Constant(BETA), penalty="reward")])
@pytest.mark.parametrize("source", [fresh, distinct, by_reward])
def test_with_the_pull_in_the_reward_and_a_baseline_pi_star_is_a_fixed_point_however_groups_are_drawn(
    objective: Objective, source: Chances
) -> None:
    policy = at_ideal()
    groups, chance_G = source(distribution(policy)[0].detach())
    assert chance_G.sum() == pytest.approx(1)
    assert expected_gradient(objective, policy, batch_of(groups), chance_G) < 1e-7


@pytest.mark.parametrize("objective", [TB, Grpo(Constant(BETA), penalty="reward")])
def test_so_they_settle_there_on_distinct_answers(objective: Objective) -> None:
    assert settled(objective, distinct) < 1e-3


@pytest.mark.parametrize(("source", "distance"), [(fresh, 0.00), (distinct, 0.09), (by_reward, 0.24)])
def test_without_a_baseline_distinct_answers_and_selection_by_reward_move_reinforce(
    source: Chances, distance: float
) -> None:
    assert settled(REINFORCE, source) == pytest.approx(distance, abs=0.005)


@pytest.mark.parametrize(
    ("objective", "source", "distance"),
    [
        (GRPO, fresh, 0.53),
        (GRPO, distinct, 0.27),
        (GRPO, by_reward, 0.50),
        (DR_GRPO, fresh, 0.16),
        (DR_GRPO, distinct, 0.21),
        (DR_GRPO, by_reward, 0.16),
    ],
)
def test_with_k3_in_the_loss_the_optimum_is_another_on_policy_too_and_how_groups_are_drawn_moves_it(
    objective: Objective, source: Chances, distance: float
) -> None:
    assert settled(objective, source) == pytest.approx(distance, abs=0.005)


def test_the_on_policy_gradient_of_k3_is_that_of_the_kl_from_the_reference_to_the_policy() -> None:
    policy = at_ideal()
    (parameter,) = policy.parameters()
    batch = batch_of([(o,) for o in OUTCOMES])
    log_pi_B = policy.evaluate(batch).log_policy_BT[:, 0]
    chance_B = log_pi_B.detach().exp()
    (gradient,) = torch.autograd.grad((chance_B * k3(log_pi_B[:, None], batch)[:, 0]).sum(), parameter)
    log_pi_B = policy.evaluate(batch).log_policy_BT[:, 0]
    reference_B = batch.log_reference_BT[:, 0]
    forward = (reference_B.exp() * (reference_B - log_pi_B)).sum()  # KL(pi_ref || pi)
    (expected,) = torch.autograd.grad(forward, parameter, retain_graph=True)
    reverse = (log_pi_B.exp() * (log_pi_B - reference_B)).sum()  # KL(pi || pi_ref)
    (kl_gradient,) = torch.autograd.grad(reverse, parameter)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    assert (gradient - kl_gradient).abs().max() > 0.1
