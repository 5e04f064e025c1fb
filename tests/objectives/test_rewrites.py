"""Every objective but the forms of Trajectory Balance (test_forms.py) against its line of docs/objectives.md: loops
over rows and tokens, one number at a time, in float64. Value and gradient agree to 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
import torch
from objective_cases import random_batch
from torch import Tensor

from tba.batch import Batch
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
from tba.protocols import Objective, PolicyOutput
from tba.schedules import Constant

beta = 0.3
BETA = Constant(beta)
Number = Any  # a tensor without dimensions, or a float
Formula = Callable[[Sequence["Row"]], Number]


@dataclass
class Row:
    """One answer; the lists are over the tokens that the policy sampled."""

    group: int
    reward: float
    pi: list[Tensor]  # log-probabilities, with gradients
    reference: list[float]
    mu: list[float]
    value: list[Tensor]
    place: list[int]  # in the answer, observations counted
    length: int
    log_z: Tensor
    steps: list[tuple[int, float]]  # (where a step begins, its value)
    age: int  # in updates; -1: not known

    @property
    def now(self) -> list[float]:
        """log pi as it is, without gradient."""
        return [float(p.detach()) for p in self.pi]

    @property
    def k(self) -> float:
        return sum(p - q for p, q in zip(self.now, self.reference, strict=True))

    def rho(self, token: int) -> Number:
        return (self.pi[token] - self.mu[token]).exp()

    @property
    def whole_rho(self) -> Number:
        return sum((p - m for p, m in zip(self.pi, self.mu, strict=True)), torch.zeros(())).exp()


def others(rows: Sequence[Row], row: Row) -> list[Row]:
    return [r for r in rows if r.group == row.group and r is not row]


def group(rows: Sequence[Row], row: Row) -> list[Row]:
    return [r for r in rows if r.group == row.group]


def tokens(rows: Sequence[Row]) -> int:
    return sum(len(r.pi) for r in rows)


def clip(rho: Number, a: float, low: float = 0.8, high: float = 1.2) -> Number:
    """max(-rho A, -clip(rho) A)."""
    bounded = min(max(float(rho.detach()), low), high)
    return -rho * a if -float(rho.detach()) * a >= -bounded * a else -bounded * a


def k3(pi: Tensor, reference: float) -> Number:
    term = (reference - pi).exp() - (reference - pi) - 1
    return term if float(term.detach()) <= 10 else 10.0


def reinforce(baseline: str, penalised: str = "policy") -> Formula:
    def loss(rows: Sequence[Row]) -> Number:
        def s(r: Row) -> float:
            q = r.now if penalised == "policy" else r.mu
            return r.reward - beta * sum(a - b for a, b in zip(q, r.reference, strict=True))

        def b(r: Row) -> float:
            if baseline == "none":
                return 0.0
            return fmean(s(o) for o in (others(rows, r) if baseline == "leave_one_out" else group(rows, r)))

        return sum(-(s(r) - b(r)) * sum(r.pi) for r in rows) / len(rows)

    return loss


def proximal(rows: Sequence[Row]) -> Number:
    def s(r: Row) -> float:
        return r.reward - beta * sum(m - q for m, q in zip(r.mu, r.reference, strict=True))

    return sum(clip(r.whole_rho, s(r) - fmean(s(o) for o in others(rows, r))) for r in rows) / len(rows)


def grpo(standardise: bool, per: str) -> Formula:
    def loss(rows: Sequence[Row]) -> Number:
        total: Number = 0.0
        for r in rows:
            group_values = [o.reward for o in group(rows, r)]
            a = r.reward - fmean(group_values)
            if standardise:
                a /= (
                    math.sqrt(sum((x - fmean(group_values)) ** 2 for x in group_values) / (len(group_values) - 1))
                    + 1e-4
                )
            terms = sum(clip(r.rho(t), a) + beta * k3(r.pi[t], r.reference[t]) for t in range(len(r.pi)))
            total = total + terms / {"sequence": len(r.pi) * len(rows), "row": len(rows), "token": tokens(rows)}[per]
        return total

    return loss


def standardised(rows: Sequence[Row], r: Row) -> float:
    rewards = [o.reward for o in group(rows, r)]
    spread = math.sqrt(sum((x - fmean(rewards)) ** 2 for x in rewards) / (len(rewards) - 1))
    return (r.reward - fmean(rewards)) / (spread + 1e-4)


def divergence(rows: Sequence[Row]) -> Number:
    return sum(beta * k3(p, q) / len(r.pi) / len(rows) for r in rows for p, q in zip(r.pi, r.reference, strict=True))


def decoupled(rows: Sequence[Row]) -> Number:
    total = divergence(rows)
    for r in rows:
        share = 1.0 if r.age < 0 else 0.0 if r.age == 0 else 1 / r.age
        for t, now in enumerate(r.now):
            proximal = share * r.mu[t] + (1 - share) * now
            weight = min(math.exp(proximal - r.mu[t]), 8.0)
            term = weight * clip((r.pi[t] - proximal).exp(), standardised(rows, r))
            total = total + term / len(r.pi) / len(rows)
    return total


def gspo(rows: Sequence[Row]) -> Number:
    total = divergence(rows)
    for r in rows:
        ratio = (sum(p - m for p, m in zip(r.pi, r.mu, strict=True)) / len(r.pi)).exp()
        total = total + clip(ratio, standardised(rows, r), 1 - 3e-4, 1 + 4e-4) / len(rows)
    return total


def cispo(rows: Sequence[Row]) -> Number:
    total: Number = 0.0
    for r in rows:
        for t, (now, p) in enumerate(zip(r.now, r.pi, strict=True)):
            weight = min(math.exp(now - r.mu[t]), 1.28)
            total = total - weight * standardised(rows, r) * p + beta * k3(p, r.reference[t])
    return total / tokens(rows)


def tba_prime(rows: Sequence[Row]) -> Number:
    def kl(r: Row) -> float:
        return sum(min(max(p - q, -10.0), 10.0) for p, q in zip(r.now, r.reference, strict=True))

    total: Number = 0.0
    for r in rows:
        group_rows = group(rows, r)
        a = r.reward - fmean(o.reward for o in group_rows) - beta * (kl(r) - fmean(kl(o) for o in group_rows))
        for t in range(len(r.pi)):
            total = total - a * (r.rho(t) if float(r.rho(t).detach()) <= 8 else 8.0)
    return total / tokens(rows)


def white(rows: Sequence[Row], advantage: list[list[float]]) -> list[list[float]]:
    every = [a for row_advantages in advantage for a in row_advantages]
    scale = math.sqrt(sum((a - fmean(every)) ** 2 for a in every) / len(every) + 1e-8)
    return [[(a - fmean(every)) / scale for a in row_advantages] for row_advantages in advantage]


def ppo(rows: Sequence[Row]) -> Number:
    advantage = []
    for r in rows:
        advantages, after, later = [0.0] * len(r.pi), 0.0, 0.0
        for t in reversed(range(len(r.pi))):
            v = float(r.value[t].detach())
            reward = -beta * (r.mu[t] - r.reference[t]) + (r.reward if t == len(r.pi) - 1 else 0.0)
            advantages[t] = later = reward + after - v + 0.95 * later
            after = v
        advantage.append(advantages)
    total: Number = 0.0
    for r, advantages, used in zip(rows, advantage, white(rows, advantage), strict=True):
        for t, v in enumerate(r.value):
            total = total + clip(r.rho(t), used[t]) + 0.1 * (v - advantages[t] - v.detach()) ** 2 / 2
    return total / tokens(rows)


def vine(rows: Sequence[Row]) -> Number:
    advantage = []
    for r in rows:
        advantages = []
        for place in r.place:
            i = max(i for i, (start, _) in enumerate(r.steps) if start <= place)
            after = r.steps[i + 1][1] if i + 1 < len(r.steps) else r.reward
            advantages.append(after - r.steps[i][1])
        advantage.append(advantages)
    total: Number = 0.0
    for r, used in zip(rows, white(rows, advantage), strict=True):
        total = total + sum(clip(r.rho(t), a) + beta * k3(r.pi[t], r.reference[t]) for t, a in enumerate(used))
    return total / tokens(rows)


def dpo(ipo: bool) -> Formula:
    def loss(rows: Sequence[Row]) -> Number:
        def ratio(r: Row) -> Number:
            return sum(p - q for p, q in zip(r.pi, r.reference, strict=True))

        total: Number = 0.0
        for g in sorted({r.group for r in rows}):
            group_values = [r for r in rows if r.group == g]
            best, worst = max(r.reward for r in group_values), min(r.reward for r in group_values)
            if best == worst:
                continue
            pairs = [(a, b) for a in group_values for b in group_values if a.reward == best and b.reward == worst]
            for a, b in pairs:
                d = ratio(a) - ratio(b)
                term = (d - 1 / (2 * 0.1)) ** 2 if ipo else (1 + (-0.1 * d).exp()).log()
                total = total + term * len(group_values) / len(pairs) / len(rows)
        return total

    return loss


def raft(best: bool) -> Formula:
    def loss(rows: Sequence[Row]) -> Number:
        total: Number = 0.0
        for r in rows:
            group_values = [o.reward for o in group(rows, r)]
            best_share = (
                len(group_values) / group_values.count(max(group_values)) if r.reward == max(group_values) else 0.0
            )
            total = total - (best_share if best else float(r.reward > 0)) * sum(r.pi)
        return total / len(rows)

    return loss


def subtb(lam: float) -> Formula:
    def loss(rows: Sequence[Row]) -> Number:
        total: Number = 0.0
        for r in rows:
            v = [*r.value, r.reward]
            at = [*r.place, r.length]
            above, below = torch.zeros((), dtype=torch.float64), 0.0
            for i in range(len(r.pi)):
                for j in range(i + 1, len(r.pi) + 1):
                    between = sum(r.pi[t] - r.reference[t] for t in range(i, j))
                    d, weight = beta * between + v[i] - v[j], lam ** (at[j] - at[i])
                    above, below = above + weight * d**2, below + weight
            total = total + above / below / (2 * beta)
        return total / len(rows)

    return loss


def by_token(rows: Sequence[Row]) -> Number:
    return sum(
        beta / 2 * sum((p - q) ** 2 for p, q in zip(r.pi, r.reference, strict=True)) / len(r.pi) for r in rows
    ) / len(rows)


def learned(rows: Sequence[Row]) -> Number:
    return sum(beta / 2 * (r.log_z + sum(r.pi) - sum(r.reference) - r.reward / beta) ** 2 for r in rows) / len(rows)


def tempered(rows: Sequence[Row]) -> Number:
    """log pi* + log Z = (log pi_ref / g + r / beta) / T, T 2 and g 0.5, with the paper's weights of 1."""

    def gap(r: Row, pi: Sequence[Number]) -> Number:
        return (sum(r.reference) / 0.5 + r.reward / beta) / 2 - sum(pi)

    return sum(2 * beta / 2 * (gap(r, r.pi) - fmean(gap(o, o.now) for o in group(rows, r))) ** 2 for r in rows) / len(
        rows
    )


CASES: dict[str, tuple[Objective, Formula]] = {
    "reinforce": (Reinforce(BETA, "none"), reinforce("none")),
    "reinforce, mean": (Reinforce(BETA, "mean"), reinforce("mean")),
    "rloo": (Reinforce(BETA), reinforce("leave_one_out")),
    "rloo, the behaviour penalised": (Reinforce(BETA, penalised="behavior"), reinforce("leave_one_out", "behavior")),
    "proximal rloo": (proximal_rloo(BETA), proximal),
    "grpo": (Grpo(BETA), grpo(True, "sequence")),
    "grpo by token": (Grpo(BETA, loss_aggregation="token"), grpo(True, "token")),
    "dr grpo": (dr_grpo(BETA), grpo(False, "row")),
    "decoupled ppo": (Grpo(BETA, correction=Correction("decoupled")), decoupled),
    "gspo": (Grpo(BETA, correction=Correction("clip", "mean", clip=3e-4, clip_high=4e-4)), gspo),
    "cispo": (Grpo(BETA, loss_aggregation="token", correction=Correction("truncate", cap=1.28)), cispo),
    "tba'": (TbaPrime(BETA), tba_prime),
    "ppo": (Ppo(BETA), ppo),
    "vine ppo": (VinePpo(BETA), vine),
    "online dpo": (OnlineDpo(), dpo(ipo=False)),
    "online ipo": (OnlineDpo(loss="ipo"), dpo(ipo=True)),
    "raft": (Raft(), raft(best=False)),
    "raft, best": (Raft("best"), raft(best=True)),
    "subtb": (SubtrajectoryBalance(BETA), subtb(1.0)),
    "subtb, short stretches": (SubtrajectoryBalance(BETA, lam=0.8), subtb(0.8)),
    "subtb, flow of one": (SubtrajectoryBalance(BETA, flow="one"), by_token),
    "learned log Z": (TrajectoryBalance(BETA, log_z="learned", off_policy="none"), learned),
    "tempered": (
        TrajectoryBalance(
            BETA, off_policy="none", reward_temperature=Constant(2.0), reference_temperature=Constant(0.5)
        ),
        tempered,
    ),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("ties", [False, True])
def test_value_and_gradient_are_those_of_the_documents(name: str, ties: bool) -> None:
    """Away from the behaviour by up to some nats, so that bounds are active; `ties`: rewards of 0 and 1."""
    objective, formula = CASES[name]
    for seed in range(4):
        batch, log_policy_BT = random_batch(seed)
        assert batch.log_behavior_BT is not None
        log_policy_BT = batch.log_behavior_BT + 3 * (log_policy_BT - batch.log_behavior_BT)
        batch = with_steps(replace(batch, reward_B=(batch.reward_B > 0).double()) if ties else batch, seed)
        batch = replace(batch, lag_B=torch.arange(batch.rows) % 5 - 1)
        generator = torch.Generator().manual_seed(seed)
        leaves = [
            log_policy_BT.clone().requires_grad_(),
            torch.randn(log_policy_BT.shape, dtype=torch.float64, generator=generator).requires_grad_(),
            torch.randn(batch.groups, dtype=torch.float64, generator=generator).requires_grad_(),
        ]
        values, slopes = [], []
        output = PolicyOutput(leaves[0], value_BT=leaves[1], log_z_G=leaves[2])
        for loss in (objective(output, batch, 1)[0], formula(rows_of(batch, leaves))):
            values.append(float(loss.detach()))
            slopes.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves, materialize_grads=True)]))
        assert values[0] == pytest.approx(values[1], rel=1e-12, abs=1e-12)
        torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-12, atol=1e-12)
        assert slopes[0].abs().max() > 0.01


def with_steps(batch: Batch, seed: int) -> Batch:
    """Steps of two positions each, of values that came from nowhere."""
    steps = -(-batch.mask_BT.shape[1] // 2)
    start_BS = (2 * torch.arange(steps)).minimum(batch.length_B[:, None])
    value_BS = torch.rand(batch.rows, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return replace(batch, step_start_BS=start_BS, step_value_BS=value_BS.where(start_BS < batch.length_B[:, None], 0.0))


def rows_of(batch: Batch, leaves: Sequence[Tensor]) -> list[Row]:
    log_policy_BT, value_BT, log_z_G = leaves
    assert batch.log_behavior_BT is not None
    assert batch.step_start_BS is not None
    assert batch.step_value_BS is not None
    rows = []
    for b in range(batch.rows):
        place = torch.nonzero(batch.mask_BT[b]).flatten().tolist()
        steps = [
            (int(start), float(value))
            for start, value in zip(batch.step_start_BS[b], batch.step_value_BS[b], strict=True)
            if start < batch.length_B[b]
        ]
        rows.append(
            Row(
                int(batch.group_B[b]),
                float(batch.reward_B[b]),
                [log_policy_BT[b, t] for t in place],
                [float(batch.log_reference_BT[b, t]) for t in place],
                [float(batch.log_behavior_BT[b, t]) for t in place],
                [value_BT[b, t] for t in place],
                place,
                int(batch.length_B[b]),
                log_z_G[batch.group_B[b]],
                steps,
                b % 5 - 1,
            )
        )
    return rows
