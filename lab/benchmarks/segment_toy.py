"""One residual for a whole episode of several segments, or one for each call: where Trajectory Balance then ends.

    python lab/benchmarks/segment_toy.py [--steps 1600] [--worlds 16] [--rows 64]

An episode is two calls of three actions each. The second reads nothing but a summary of the first, which says whether
its action was 2. In half of the worlds the reward of the second action depends on the summary alone, so that the
target, pi_ref exp(r / beta) / Z, is a policy of this shape; in the others the reward is drawn for each pair of actions:
the summary loses what matters, and the target is no such policy.

A run has all worlds as prompts and trains tables with `TrajectoryBalance` itself. Own data: episodes of the policy at
that step, drawn systematically. Uniform data: each of the nine episodes once, with its log-probability under uniform
actions. `episode` is one row with one residual; `call` is one row for each call with the episode's reward, in the group
of its context, as prompts are grouped; `call, by problem` has all calls to a problem in one group.

Printed are means over worlds: the total variation distance to the target, and by how much the regularised reward,
E[r] - beta KL(pi || pi_ref), is short of that of the best policy of this shape, which is found by maximising it.

Shape legend: W worlds, A actions, S summaries, E episodes of a world, K rows of a group, B rows, T places.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tba.batch import Batch
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import PolicyOutput
from tba.schedules import Constant

ACTIONS, BETA, RATE = 3, 0.5, 0.1
SUMMARY_A = torch.tensor([0, 0, 1])  # of each first action
FIRST_E = torch.arange(ACTIONS).repeat_interleave(ACTIONS)
SECOND_E = torch.arange(ACTIONS).repeat(ACTIONS)
SUMMARY_E = SUMMARY_A[FIRST_E]
Residual: TypeAlias = Literal["episode", "call", "call, by problem"]
Form: TypeAlias = Literal["asymmetric", "exact", "none"]
RESIDUALS: tuple[Residual, ...] = ("episode", "call", "call, by problem")
FORMS: tuple[Form, ...] = ("asymmetric", "exact", "none")
DATA = ("own", "uniform")


@dataclass(frozen=True)
class Worlds:
    """Holds rewards and the reference's log-probabilities, in float64."""

    reward_WE: Tensor
    first_WA: Tensor
    second_WSA: Tensor

    @classmethod
    def of(cls, count: int) -> Worlds:
        """Returns worlds, of which the summaries of the first half are enough."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        reward_WE = normal(count, ACTIONS)[:, FIRST_E] + normal(count, 2, ACTIONS)[:, SUMMARY_E, SECOND_E]
        reward_WE[count // 2 :] = normal(count - count // 2, ACTIONS**2)
        return cls(reward_WE, normal(count, ACTIONS).log_softmax(-1), normal(count, 2, ACTIONS).log_softmax(-1))

    def calls(self, first_WA: Tensor, second_WSA: Tensor) -> Tensor:
        """Returns the log-probabilities of both calls of each episode under some tables: [W, E, 2]."""
        return torch.stack([first_WA[:, FIRST_E], second_WSA[:, SUMMARY_E, SECOND_E]], -1)

    @property
    def reference_WE2(self) -> Tensor:
        """Returns the log-probabilities of each episode's calls under the reference."""
        return self.calls(self.first_WA, self.second_WSA)

    def objective(self, log_WE: Tensor) -> Tensor:
        """Returns the regularised reward of policies with these log-probabilities of episodes: [W]."""
        return (log_WE.exp() * (self.reward_WE - BETA * (log_WE - self.reference_WE2.sum(-1)))).sum(1)

    def distance(self, log_WE: Tensor) -> Tensor:
        """Returns the total variation distance to the target: [W]."""
        target_WE = (self.reference_WE2.sum(-1) + self.reward_WE / BETA).softmax(1)
        return (log_WE.exp() - target_WE).abs().sum(1) / 2


class Tables:
    """A policy of this shape: logits of the first action, and of the second by summary. It begins as the reference."""

    def __init__(self, worlds: Worlds, steps: int) -> None:
        self._worlds, self._steps = worlds, steps
        self._logits = [x.clone().requires_grad_() for x in (worlds.first_WA, worlds.second_WSA)]
        self._optimizer = torch.optim.Adam(self._logits, lr=RATE)

    def calls(self) -> Tensor:
        """Returns the log-probabilities of both calls of each episode: [W, E, 2]."""
        first_WA, second_WSA = (x.log_softmax(-1) for x in self._logits)
        return self._worlds.calls(first_WA, second_WSA)

    def update(self, loss: Tensor, step: int) -> None:
        """Take a step of a rate that falls to 0, so that what is left of noise is averaged."""
        self._optimizer.param_groups[0]["lr"] = RATE * (1 - step / self._steps)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def best(worlds: Worlds, steps: int) -> Tensor:
    """Returns the log-probabilities of episodes, [W, E], under the best policies of this shape."""
    tables = Tables(worlds, steps)
    for step in range(steps):
        tables.update(-worlds.objective(tables.calls().sum(-1)).sum(), step)
    return tables.calls().sum(-1).detach()


def trained(worlds: Worlds, form: Form, residual: Residual, data: str, steps: int, rows: int) -> Tensor:
    """Returns the log-probabilities of episodes, [W, E], where Trajectory Balance ends."""
    tables, balance = Tables(worlds, steps), TrajectoryBalance(Constant(BETA), off_policy=form).start()
    count, generator = len(worlds.reward_WE), torch.Generator().manual_seed(1)
    for step in range(steps):
        calls_WE2 = tables.calls()
        if data == "own":
            episode_WK = systematic(calls_WE2.detach().sum(-1).exp(), rows, generator)
            behavior_WE2 = calls_WE2.detach()
        else:
            episode_WK = torch.arange(ACTIONS**2).repeat(count, 1)
            behavior_WE2 = torch.full_like(calls_WE2, -math.log(ACTIONS))
        output, batch = batch_of(worlds, calls_WE2, behavior_WE2, episode_WK, residual)
        loss, _ = balance(output, batch, step + 1)
        tables.update(loss, step)
    return tables.calls().sum(-1).detach()


def systematic(share_WE: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Returns [W, K] episodes: each as often as its share of `rows`, rounded up or down by chance."""
    place_WK = (torch.arange(rows) + torch.rand(len(share_WE), 1, generator=generator, dtype=torch.float64)) / rows
    return torch.searchsorted(share_WE.cumsum(1), place_WK).clamp(max=share_WE.shape[1] - 1)


def batch_of(
    worlds: Worlds, policy_WE2: Tensor, behavior_WE2: Tensor, episode_WK: Tensor, residual: Residual
) -> tuple[PolicyOutput, Batch]:
    """Returns the episodes as rows: one for each, of an action, a summary that is read and an action, or two for each,
    of one action.
    """
    count, rows = episode_WK.shape
    world_B, episode_B = torch.arange(count).repeat_interleave(rows), episode_WK.flatten()
    logs = [x[world_B, episode_B] for x in (policy_WE2, behavior_WE2, worlds.reference_WE2)]  # each [B, 2]
    reward_B, group_B, groups = worlds.reward_WE[world_B, episode_B], world_B, count
    if residual == "episode":
        log_BT = [torch.stack([x[:, 0], torch.zeros_like(x[:, 0]), x[:, 1]], 1) for x in logs]
        mask_BT = torch.tensor([True, False, True]).repeat(len(world_B), 1)
        segment_start_BL = torch.ones(len(world_B), 1, dtype=torch.int64)
    else:
        log_BT = [x.T.reshape(-1, 1) for x in logs]  # all first calls, then all second ones
        mask_BT, segment_start_BL = torch.ones_like(log_BT[0], dtype=torch.bool), None
        reward_B = reward_B.repeat(2)
        by_context = (1 + SUMMARY_E[episode_B]) * count if residual == "call" else 0
        group_B, groups = torch.cat([world_B, world_B + by_context]), 3 * count if residual == "call" else count
    zeros_BT = torch.zeros(mask_BT.shape, dtype=torch.int64)
    batch = Batch(
        prompt_GP=torch.zeros(groups, 1, dtype=torch.int64),
        prompt_length_G=torch.ones(groups, dtype=torch.int64),
        completion_BT=zeros_BT,
        length_B=torch.full((len(mask_BT),), mask_BT.shape[1]),
        mask_BT=mask_BT,
        log_reference_BT=log_BT[2],
        reward_B=reward_B,
        group_B=group_B,
        log_behavior_BT=log_BT[1],
        segment_start_BL=segment_start_BL,
    )
    return PolicyOutput(log_BT[0]), batch


def table(steps: int, count: int, rows: int) -> Iterator[str]:
    """Yields the lines of the table, in Markdown."""
    columns = [f"`{form}`, summary {kind}" for kind in ("enough", "losing") for form in FORMS]
    yield f"| residual for each | data | {' | '.join(columns)} |"
    yield "|---" * (2 + len(columns)) + "|"
    worlds = Worlds.of(count)
    best_WE = best(worlds, 10 * steps)  # without noise, and cheap
    yield _line(worlds, best_WE, "(best policy)", "", [best_WE] * len(FORMS))
    for residual in RESIDUALS:
        for data in DATA:
            ends = [trained(worlds, form, residual, data, steps, rows) for form in FORMS]
            yield _line(worlds, best_WE, residual, data, ends)


def _line(worlds: Worlds, best_WE: Tensor, residual: str, data: str, ends: Sequence[Tensor]) -> str:
    """Returns a line: of each half of the worlds, by form, the distance to the target and the shortfall."""
    cells = []
    for half in torch.arange(len(best_WE)).tensor_split(2):
        for end_WE in ends:
            distance = worlds.distance(end_WE)[half].mean()
            shortfall = (worlds.objective(best_WE) - worlds.objective(end_WE))[half].mean()
            cells.append(f"{float(distance):.4f} ({float(shortfall):.4f})")
    return f"| {residual} | {data} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for line in table(options.steps, options.worlds, options.rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
