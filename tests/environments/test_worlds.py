"""What Trajectory Balance determines where the policy cannot see which world it is in (docs/method.md, worlds).

One question, two worlds: the world of seed 1 pays 1 more than that of seed 0 for whatever is done, and says which of
the two it is after the first symbol. One policy is the ideal one in both, since what a world pays to everybody is in
its own log Z.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from tests.environments.turning_toy import Play, distance_to_ideal, log_probability, plays

from tba.batch import collate
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.schedules import Constant, WarmupCosine
from tba.types import Completion, Group, Prompt, Sampling, StopReason, Trajectory, Version
from tba_lab.tb_forms import lowered
from toy.policy import TabularPolicy, TabularReference, TabularTask

TASK = TabularTask(symbols=4, length=3, prompts=1, reference_spread=0.0)  # what follows is worth the same in both
PROMPT = Prompt(TASK.name, np.array([5], dtype=np.int32), "a")
BETA = 0.25
PLAIN = TrajectoryBalance(Constant(BETA), off_policy="none")


class Paying:
    """After the first symbol it says A or B, by its seed; the seed is also paid."""

    def reset(self, seed: int) -> None:
        self.seed, self.said = seed, ""

    def step(self, text: str) -> str | None:
        self.said += text
        return None if text == "$" or len(self.said) == 2 else "AB"[self.seed]

    def get_reward(self) -> float:
        return self.seed + float(np.random.default_rng([*self.said.encode()]).random())


def trained(objective: Objective, together: bool) -> list[float]:
    """Each play of both worlds once in every batch, as uniformly random play gives them: in one group, or in a group
    for each world. Returns the distance to the ideal policy in each world.
    """
    policy, steps = TabularPolicy(TASK), 500
    worlds = [[trajectory(play, world) for play in plays(Paying, world)] for world in (0, 1)]
    groups = [list(chain.from_iterable(worlds))] if together else worlds
    batch = collate([Group.of(group) for group in groups])
    optimizer, rate = torch.optim.Adam(policy.parameters()), WarmupCosine(steps)
    for step in range(1, steps + 1):
        loss, _ = objective(policy.evaluate(batch), batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * rate(step)
        optimizer.step()
    return [distance_to_ideal(policy, Paying, {0: world}, BETA) for world in (0, 1)]


def trajectory(play: Play, world: int) -> Trajectory:
    tokens, mask = np.array(play.tokens, np.int32), np.array(play.mask)
    uniform = np.where(mask, np.float32(-np.log(5)), np.float32(0))  # four symbols and the end
    completion = Completion(tokens, "", StopReason.EOS, (Version(), Version()), Sampling(), uniform, mask)
    log_reference = TabularReference(TASK).log_probabilities(PROMPT, [completion])[0]
    return Trajectory(f"{world}{play.tokens}", PROMPT, completion, play.reward, log_reference, Version())


def test_one_policy_is_ideal_in_both_worlds_and_far_from_the_reference() -> None:
    assert [len(list(plays(Paying, world))) for world in (0, 1)] == [21, 21]
    assert min(distance_to_ideal(TabularPolicy(TASK), Paying, {0: world}, BETA) for world in (0, 1)) > 0.2


def test_with_one_world_in_a_group_it_is_reached_from_any_data() -> None:
    assert max(trained(PLAIN, together=False)) <= 0.02


def test_with_several_worlds_in_a_group_the_data_decide_where_the_papers_form_leads() -> None:
    """What a world pays to everybody looks like merit of whatever was said in it."""
    assert max(trained(PLAIN, together=True)) == pytest.approx(0.43, abs=0.01)
    assert max(trained(TrajectoryBalance(Constant(BETA), off_policy="tapered"), together=True)) > 0.3
    assert max(trained(lowered(Constant(BETA)), together=True)) > 0.03


def test_weighted_as_if_they_were_the_policys_own_they_lead_to_the_ideal_all_the_same() -> None:
    assert max(trained(TrajectoryBalance(Constant(BETA), off_policy="exact"), together=True)) <= 1e-3


def test_an_observation_is_part_of_no_probability() -> None:
    policy = TabularPolicy(TASK)
    for world in (0, 1):
        total = sum(float(log_probability(policy, 0, play).exp()) for play in plays(Paying, world))
        assert abs(total - 1) < 1e-6  # over the policy's own tokens; with the observations' it would be less
