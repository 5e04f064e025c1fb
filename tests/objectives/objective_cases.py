"""Batches with everything an objective may need, slopes of a loss at its inputs, and every objective there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.batch import Batch, collate
from tba.objectives.correction import Correction
from tba.objectives.distil import Distil
from tba.objectives.grpo import Grpo, dr_grpo
from tba.objectives.online_dpo import OnlineDpo
from tba.objectives.policy_gradient import Reinforce, proximal_rloo
from tba.objectives.ppo import Ppo
from tba.objectives.raft import Raft
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.objectives.vine_ppo import VinePpo
from tba.protocols import HEADS, Measured, Objective, PolicyOutput
from tba.schedules import Constant
from tba.types import TOP_IDS, TOP_LOGS, Group, Sampling, Trajectory, Version
from toy.engine import TabularEngine, sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularReference, TabularTask

TASK = TabularTask(symbols=3, length=4, prompts=3)
BETA = Constant(0.3)
OBJECTIVES: dict[str, Objective] = {
    "tb": TrajectoryBalance(BETA),
    "tb-learned": TrajectoryBalance(BETA, log_z="learned"),
    "tb-exact": TrajectoryBalance(BETA, off_policy="exact"),
    "tb-paper": TrajectoryBalance(BETA, off_policy="none"),
    "tb-tapered": TrajectoryBalance(BETA, off_policy="tapered"),
    "tb-learned-plain": TrajectoryBalance(BETA, log_z="learned", off_policy="none"),
    "subtb": SubtrajectoryBalance(BETA, lam=0.8),
    "subtb-tokens": SubtrajectoryBalance(BETA, flow="one"),
    "distil": Distil(),
    "distil-forward-pulled": Distil("forward", pull=0.3, loss_aggregation="sequence"),
    "distil-js": Distil("js", loss_aggregation="token"),
    "tba-prime": TbaPrime(BETA),
    "tba-prime-rows": TbaPrime(BETA, loss_aggregation="row"),
    "reinforce": Reinforce(BETA, "none"),
    "rloo-truncated": Reinforce(BETA, correction=Correction("truncate", cap=1.5)),
    "rloo-truncated-sequences": Reinforce(BETA, correction=Correction("truncate", "sequence", cap=1.5)),
    "proximal-rloo": proximal_rloo(BETA),
    "grpo": Grpo(BETA),
    "grpo-ratio": Grpo(BETA, correction=Correction("clamp", cap=1.5)),
    "grpo-tokens": Grpo(BETA, loss_aggregation="token"),
    "grpo-decoupled": Grpo(BETA, correction=Correction("decoupled", cap=1.5)),
    "gspo": Grpo(BETA, correction=Correction("clip", "mean", clip=0.1, clip_high=0.2)),
    "dr-grpo": dr_grpo(BETA),
    "dr-grpo-ratio": dr_grpo(BETA, "clamp", penalty="reward"),
    "raft": Raft(),
    "raft-best-truncated": Raft("best", loss_aggregation="token", correction=Correction("truncate", cap=1.5)),
    "online-dpo": OnlineDpo(),
    "online-ipo": OnlineDpo(loss="ipo"),
    "ppo": Ppo(BETA),
    "ppo-plain": Ppo(BETA, gamma=0.9, value_clip=0.1, whiten=False, penalised="policy", loss_aggregation="row"),
    "vine-ppo": VinePpo(BETA),
    "vine-ppo-plain": VinePpo(BETA, whiten=False, loss_aggregation="sequence"),
}


def perturbed(seed: int = 0, scale: float = 0.5, task: TabularTask = TASK) -> TabularPolicy:
    """A policy away from its reference, with heads that say something."""
    policy = TabularPolicy(task, 1.0, torch.float64, HEADS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return policy


def sampled(
    policy: TabularPolicy, sizes: Sequence[int], temperature: float = 1.0, seed: int = 0, holes: float = 0.0
) -> Batch:
    """A group of each size, the behaviour's log-probabilities, made-up steps and ages included, in float64.

    A share `holes` of the tokens counts as not sampled by the policy.
    """
    rng, engine = np.random.default_rng(seed), TabularEngine(policy.task)
    engine.load(policy.weights(), Version(0, 1))
    prompts = tabular_prompts(policy.task)
    groups = []
    for g, size in enumerate(sizes):
        (group,) = sample_groups(policy.task, [prompts[g % len(prompts)]], size, Sampling(temperature), rng, engine)
        groups.append(Group.of([_with_steps(t, policy.task, holes, rng) for t in group.trajectories]))
    batch = precise(collate(groups))
    return replace(batch, lag_B=torch.arange(batch.rows) % 5 - 1, log_anchor_BT=0.9 * batch.log_reference_BT)


def precise(batch: Batch) -> Batch:
    """The same in float64."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: x.double() for n, x in tensors.items() if x is not None and x.dtype == torch.float32})


def _with_steps(t: Trajectory, task: TabularTask, holes: float, rng: np.random.Generator) -> Trajectory:
    starts = np.flatnonzero(np.arange(t.length) % 2 == 0)
    arrays: dict[str, Any] = {"step_start": starts, "step_value": rng.random(len(starts)).astype(np.float32)}
    mask = rng.random(t.length) >= holes
    top = TabularReference(replace(task, seed=7)).top_scores(t.prompt, t.completion, 2)
    arrays |= {TOP_IDS: top.ids_MK[mask], TOP_LOGS: top.logs_MC[mask]}
    return replace(t, arrays=arrays, completion=replace(t.completion, mask=mask if holes else None))


def random_batch(seed: int = 0, rows: int = 12, positions: int = 6, groups: int = 3) -> tuple[Batch, Tensor]:
    """Tensors that came from nowhere, and log-probabilities [B, T] of a policy near their behaviour (float64)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    length_B = torch.randint(1, positions + 1, (rows,), generator=generator)
    length_B[0] = positions
    mask_BT = torch.arange(positions) < length_B[:, None]
    mask_BT[0, 2] = False  # a tool's turn
    behavior_BT = -0.5 - draw(rows, positions).abs()
    batch = Batch(
        prompt_GP=torch.ones(groups, 1, dtype=torch.int64),
        prompt_length_G=torch.ones(groups, dtype=torch.int64),
        completion_BT=torch.ones(rows, positions, dtype=torch.int64),
        length_B=length_B,
        mask_BT=mask_BT,
        log_reference_BT=torch.where(mask_BT, behavior_BT + 0.3 * draw(rows, positions), 0.0),
        reward_B=draw(rows),
        group_B=torch.arange(rows) % groups,
        log_behavior_BT=torch.where(mask_BT, behavior_BT, 0.0),
    )
    return batch, torch.where(mask_BT, behavior_BT + 0.5 * draw(rows, positions), 0.0)


def slopes(
    objective: Objective, batch: Batch, log_policy_BT: Tensor, value_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss's derivatives at log_policy_BT and at value_BT (zeros where it has none)."""
    leaves = [log_policy_BT.clone().requires_grad_()]
    if value_BT is not None:
        leaves.append(value_BT.clone().requires_grad_())
    loss, _ = objective(PolicyOutput(*leaves), batch, 1)
    slope_BT, *second = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return slope_BT, second[0] if second else torch.zeros_like(slope_BT)


def gradient(objective: Objective, policy: TabularPolicy, batch: Batch) -> Tensor:
    """Of all the policy's parameters, flat."""
    loss, _ = objective(policy.evaluate(batch), batch, 1)
    gradients = torch.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def floats(metrics: Measured) -> dict[str, float]:
    """Read from the device."""
    return {name: float(value) for name, value in metrics.items()}


def finite_differences(objective: Objective, policy: TabularPolicy, batch: Batch, seed: int) -> tuple[float, float]:
    """(numeric, analytic) derivative of the loss along a random direction of all parameters."""
    parameters = list(policy.parameters())
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in parameters]
    analytic = float(gradient(objective, policy, batch) @ torch.cat([d.flatten() for d in directions]))
    losses, before = [], [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for epsilon in (1e-5, -1e-5):
            for p, old, d in zip(parameters, before, directions, strict=True):
                p.copy_(old + epsilon * d)
            losses.append(float(objective(policy.evaluate(batch), batch, 1)[0]))
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
    return (losses[0] - losses[1]) / 2e-5, analytic


def per_row(batch: Batch) -> list[list[int]]:
    """The sampled positions of each row."""
    return [torch.nonzero(mask).flatten().tolist() for mask in batch.mask_BT]


def centred(x: np.ndarray, group: np.ndarray) -> np.ndarray:
    """x less its group's mean, by a plain loop."""
    return np.array([x[i] - x[group == group[i]].mean() for i in range(len(x))])
