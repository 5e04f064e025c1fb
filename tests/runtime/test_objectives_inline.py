"""Every objective in a whole run of the toy: searcher, journal, replay, trainer, checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from runs import TASK, TOY, final_weights, inline

from tba.errors import UserError
from tba.objectives.correction import Correction
from tba.objectives.grpo import Grpo, dr_grpo
from tba.objectives.online_dpo import OnlineDpo
from tba.objectives.policy_gradient import Reinforce, proximal_rloo
from tba.objectives.ppo import Ppo
from tba.objectives.raft import Raft
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.objectives.vine_ppo import VinePpo
from tba.protocols import Objective
from tba.record.metrics import read_metrics
from tba.rollout.exploration import Fixed
from tba.rollout.vine import Vine
from tba.runs.validating import validate
from tba.schedules import Constant
from tba.settings import find
from tba.training.checkpoint import newest_checkpoint
from toy.model import TabularModel
from toy.policy import WEIGHT, TabularPolicy, distribution

BETA = Constant(0.1)
OBJECTIVES: dict[str, Objective] = {
    "tb-learned": TrajectoryBalance(BETA, log_z="learned"),
    "tb-paper": TrajectoryBalance(BETA, off_policy="none"),
    "subtb": SubtrajectoryBalance(BETA),
    "tba-prime": TbaPrime(BETA),
    "rloo-truncated": Reinforce(BETA, correction=Correction("truncate")),
    "proximal-rloo": proximal_rloo(BETA),
    "grpo": Grpo(BETA),
    "dr-grpo-ratio": dr_grpo(BETA, "clamp"),
    "raft": Raft("best"),
    "online-dpo": OnlineDpo(Constant(1.0)),
    "ppo": Ppo(BETA),
}


def expected_reward(policy: TabularPolicy) -> float:
    """Exactly, the mean over the training prompts."""
    rewards_QO = torch.from_numpy(TASK.rewards_QO)
    return float((distribution(policy) * rewards_QO).sum(1)[: TASK.prompts].mean())


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_each_raises_the_reward_in_a_run_and_saves_what_it_learnt(objective: Objective, tmp_path: Path) -> None:
    schedule = ("--steps", "40", "--optimizer.schedule.steps", "40", "--replay.selection.m", "1")
    summary = inline(tmp_path / "run", *schedule, objective=objective)
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 40
    assert all(math.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
    assert summary.tokens.closes()
    policy = TabularPolicy(TASK)
    before = expected_reward(policy)
    policy.load({WEIGHT: final_weights(tmp_path / "run")[WEIGHT]})
    assert expected_reward(policy) > before + 0.06
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    heads = objective.needs & {"value", "log_z"}
    assert (checkpoint.path / "heads.safetensors").exists() == bool(heads)
    if heads:
        saved = safetensors.torch.load_file(checkpoint.path / "heads.safetensors")
        assert {name.split(".")[0] for name in saved} == heads
        assert all(float(tensor.abs().max()) > 0 for tensor in saved.values())
        policy = TabularModel(TASK).policy(1.0, heads)
        checkpoint.load_heads(policy.heads)
        assert all(torch.equal(policy.heads.state_dict()[name], tensor) for name, tensor in saved.items())


class WithoutHeads(TabularModel):
    """A model of which policies have log-probabilities and nothing else."""

    heads = frozenset[str]()


def test_a_recipe_that_cannot_give_what_its_objective_needs_is_refused_in_one_sentence() -> None:
    toy = find(str(TOY))
    with pytest.raises(UserError, match="Ppo needs value of the policy, but WithoutHeads has no such head: choose"):
        replace(toy, objective=Ppo(), model=WithoutHeads(TASK))
    with pytest.raises(UserError, match="TrajectoryBalance needs log_z of the policy, but WithoutHeads"):
        replace(toy, objective=TrajectoryBalance(BETA, log_z="learned"), model=WithoutHeads(TASK))
    for objective in (Ppo(), Grpo(), TbaPrime(BETA), Reinforce(correction=Correction("truncate"))):
        with pytest.raises(UserError, match=r"needs the log-probabilities .* sample at temperature 0.* set --expl"):
            replace(toy, objective=objective, exploration=Fixed(0.0))
    replace(toy, exploration=Fixed(0.0))  # Trajectory Balance needs none


VINE = Vine(rollouts=4, separator="B", joined="")


def test_vine_ppo_learns_from_step_values_whose_rollouts_are_counted_apart(tmp_path: Path) -> None:
    schedule = ("--steps", "20", "--optimizer.schedule.steps", "20", "--replay.selection.m", "1")
    summary = inline(tmp_path / "run", *schedule, objective=VinePpo(BETA), vine=VINE)
    assert summary.tokens.closes()
    assert summary.tokens.auxiliary > 0
    assert summary.trajectories.auxiliary % 4 == 0
    assert all(row["advantage"] > 0 and row["skipped"] == 0 for row in read_metrics(tmp_path / "run"))
    policy = TabularPolicy(TASK)
    before = expected_reward(policy)
    policy.load({WEIGHT: final_weights(tmp_path / "run")[WEIGHT]})
    assert expected_reward(policy) > before + 0.06


def test_step_values_without_a_vine_are_refused_and_a_vine_that_nobody_uses_is_pointed_out() -> None:
    toy = find(str(TOY))
    with pytest.raises(UserError, match=r"VinePpo needs the values of an answer's steps, .* give the recipe a vine"):
        replace(toy, objective=VinePpo(BETA))
    assert not [line for line in validate(replace(toy, objective=VinePpo(BETA), vine=VINE)) if "vine" in line]
    assert [line for line in validate(replace(toy, vine=VINE)) if "the objective uses no step values" in line]
