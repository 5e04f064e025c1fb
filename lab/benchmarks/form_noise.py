"""The table of noise: where forms of Trajectory Balance settle when rewards are noisy, from exact expected gradients.

    python lab/benchmarks/form_noise.py [--forms exact asymmetric] [--groups 4 8 20] [--csv FILE]

A risky answer competes with a safe one (in groups of distinct answers: with K safe ones that share the other half of
the reference). Rewards, all with a gap of 0.05 in favour of safety, beta 0.05:

    plus_minus  the risky answer gives 1 with 95 %, else -1; the safe one 0.95
    zero_one    the risky answer gives 1 with 45 %, else 0; the safe one 0.5
    world       the same, but a world that is drawn once per group decides for all risky answers in it
    gaussian    means 0.90 and 0.95, both with a standard deviation of 0.05, by three points of Gauss-Hermite, whose
                moments up to the fifth are the normal distribution's
    mostly      the risky answer gives 1 with 75 %, the safe one with 80 %, else 0: where most answers succeed, c of the
                form `asymmetric` is largest (0.55 to 1 before its bound)

so that the best policy takes the risk with probability 1 / (1 + e) = 0.269, or 0.039 where the reference has it at 10 %
(`copies`). Data:

    fresh       K answers of the policy               fixed_9, fixed_1  of (0.9, 0.1), (0.1, 0.9), risky first, for ever
    stale       of the policy 10 updates ago          distinct          drawn from the policy until K are different
    selected    K answers in proportion to pi exp(r): drawn by reward, whose noise favours what was lucky
    copies      K answers of the policy without the repeats of the risky one, of which the reference has 10 %
    rejected    a searcher rejects so many of the risky answers that they are 0.5 % of all
    deadline    the same with 5 % of all: answers whose judge takes too long
    mixed       half of (0.95, 0.05) and half of (0.05, 0.95), the latter with the next kind of rewards
    again       of the policy, one group a batch, three times running
    recorded    of the policy; the log-probabilities of risky answers are recorded 0.05 nats too high
    top_p       of the policy without a third answer, which it gives with 8 %

Every group that can occur is enumerated, and the objective's own code gives each answer's slope; nothing is sampled.
The figure is P(risky) less the best where the expected gradient is zero; stale: where 200 updates end; top_p: how far
200 updates move the third answer, of which these data say nothing.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from tba.batch import Batch
from tba.objectives.correction import log_behavior
from tba.objectives.reduce import group_mean
from tba.objectives.trajectory_balance import DECAY, Asymmetric, TrajectoryBalance, above_lowest
from tba.protocols import Objective, PolicyOutput
from tba.replay.buffer import RARE_SHARE
from tba.schedules import Constant
from tba_lab.tb_forms import lowered

BETA = 0.05
BEST = 1 / (1 + math.e)
UNSEEN = 0.08  # of the policy, in the data `top_p`
WRONG = 0.05  # nats
USES = 3  # of a group, in the data `again`
SIZES = (4, 8, 20)
REWARDS = ("plus_minus", "zero_one", "world", "gaussian", "mostly")
DATA = (
    *("fresh", "stale", "fixed_9", "fixed_1", "distinct", "selected"),
    *("copies", "rejected", "deadline", "mixed", "again", "recorded", "top_p"),
)
FORMS: Mapping[str, Callable[[], Objective]] = {
    "none": lambda: TrajectoryBalance(Constant(BETA), off_policy="none"),
    "exact": lambda: TrajectoryBalance(Constant(BETA), off_policy="exact"),
    "least_variance": lambda: TrajectoryBalance(Constant(BETA), log_z="least_variance", off_policy="none"),
    "tapered": lambda: TrajectoryBalance(Constant(BETA), off_policy="tapered"),
    "lowered": lambda: lowered(Constant(BETA)),
    "asymmetric": lambda: TrajectoryBalance(Constant(BETA), off_policy="asymmetric").start(),
}
Chances = tuple[tuple[float, float], ...]  # (reward, its probability)


@dataclass(frozen=True)
class World:
    """What answers give in one world, and how likely it is."""

    chance: float
    risky: Chances
    safe: Chances


SPREAD = tuple((BETA * x, p) for x, p in ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6)))
SAFE_HALF: Chances = ((0.5, 1.0),)
WORLDS: Mapping[str, tuple[World, ...]] = {
    "plus_minus": (World(1.0, ((1.0, 0.95), (-1.0, 0.05)), ((0.95, 1.0),)),),
    "zero_one": (World(1.0, ((1.0, 0.45), (0.0, 0.55)), SAFE_HALF),),
    "world": (World(0.45, ((1.0, 1.0),), SAFE_HALF), World(0.55, ((0.0, 1.0),), SAFE_HALF)),
    "mostly": (World(1.0, ((1.0, 0.75), (0.0, 0.25)), ((1.0, 0.80), (0.0, 0.20))),),
    "gaussian": (World(1.0, tuple((0.90 + x, p) for x, p in SPREAD), tuple((0.95 + x, p) for x, p in SPREAD)),),
}


@dataclass(frozen=True)
class Groups:
    """Groups that can occur in one world: N of them, K rows each, in float64."""

    risky_NK: Tensor  # bool
    reward_NK: Tensor
    chance_N: Tensor
    as_sampled: bool  # as replay says it of a group (`Group.as_sampled`)

    def expected(self, x_NK: Tensor, size: int) -> float:
        """Returns the expected sum over the rows of a group, over `size`."""
        return float((self.chance_N[:, None] * x_NK).sum()) / size


@cache
def multisets(kinds: int, size: int) -> tuple[Tensor, Tensor]:
    """How often each of `kinds` comes in a group of `size` [N, kinds], and in how many orders [N] (logarithm)."""
    counts = torch.tensor(list(_compositions(kinds, size)), dtype=torch.float64)
    return counts, math.lgamma(size + 1) - torch.lgamma(counts + 1).sum(1)


def _compositions(kinds: int, size: int) -> Iterator[tuple[int, ...]]:
    if kinds == 1:
        yield (size,)
        return
    for first in range(size + 1):
        for rest in _compositions(kinds - 1, size - first):
            yield (first, *rest)


def independent(world: World, size: int, risk: float, selected: bool = False) -> Groups:
    """Returns groups of independent answers, risky ones with probability `risk`."""
    (groups,) = rejected(world, size, risk, 0.0, selected)
    return groups


def rejected(world: World, size: int, risk: float, share: float, selected: bool = False) -> list[Groups]:
    """Returns groups of `size` answers less those that are rejected, by their number, which is below `size`.

    share: of all answers, how many are rejected; they are risky ones. A group with a rejected answer says so; all do
    where more than `RARE_SHARE` of all are, as in the buffer.
    """
    kinds = [(True, r, (risk - share) * p) for r, p in world.risky]
    kinds += [(False, r, (1 - risk) * p) for r, p in world.safe]
    weight_J = torch.tensor([p * (math.exp(r) if selected else 1.0) for _, r, p in kinds], dtype=torch.float64)
    risky_J = torch.tensor([is_risky for is_risky, _, _ in kinds])
    reward_J = torch.tensor([reward for _, reward, _ in kinds], dtype=torch.float64)
    made = []
    for rest in range(size, 0 if share else size - 1, -1):
        out = size - rest
        counts_NJ, orders_N = multisets(len(kinds), rest)
        chance_J = weight_J * (1 - share) / weight_J.sum()
        log_out = out * math.log(share) + math.log(math.comb(size, out)) if out else 0.0
        chance_N = (orders_N + torch.special.xlogy(counts_NJ, chance_J).sum(1) + log_out).exp()
        is_kept_N = chance_N > 1e-12  # of the rest there are a million at most
        if not is_kept_N.any():
            break
        counts_NJ, chance_N = counts_NJ[is_kept_N], chance_N[is_kept_N]
        bounds_NJ = counts_NJ.cumsum(1)
        kind_NK = (torch.arange(rest)[None, :, None] >= bounds_NJ[:, None, :]).sum(2)
        as_sampled = not selected and not out and share <= RARE_SHARE
        made.append(Groups(risky_J[kind_NK], reward_J[kind_NK], chance_N, as_sampled))
    return made


def without_copies(world: World, size: int, risk: float) -> list[Groups]:
    """Returns groups of `size` answers of which the risky one is kept once; safe ones never repeat."""
    count = torch.arange(size + 1, dtype=torch.float64)
    orders = math.lgamma(size + 1) - torch.lgamma(count + 1) - torch.lgamma(size - count + 1)
    chances = (orders + torch.special.xlogy(count, risk) + torch.special.xlogy(size - count, 1 - risk)).exp().tolist()
    copies = sum((n - 1) * chance for n, chance in enumerate(chances) if n > 1) / size  # of all answers
    made = []
    for n, chance in enumerate(chances):
        if chance < 1e-9:
            continue
        rows = []
        for reward, p in world.risky if n else ((0.0, 1.0),):
            for others, q in _safe_rewards(world.safe, size - n):
                rows.append(((reward,) * min(n, 1) + others, chance * p * q))
        rewards, chance_of = zip(*rows, strict=True)
        reward_NK, chance_N = (torch.tensor(x, dtype=torch.float64) for x in (rewards, chance_of))
        risky_NK = torch.zeros_like(reward_NK, dtype=torch.bool)
        risky_NK[:, : min(n, 1)] = True
        made.append(Groups(risky_NK, reward_NK, chance_N, n < 2 and copies <= RARE_SHARE))
    return made


def distinct(world: World, size: int, risk: float) -> Groups:
    """Draws among one risky answer and `size` safe ones, equally likely, until `size` are different.

    Each answer rings at an exponential time at its own rate; the first `size` to ring are the group. The risky one is
    missing if all safe ones ring before it.
    """
    safe = (1 - risk) / size
    nodes, weights = quantiles()
    # the time at which the risky one rings, by its quantile u: exp(-risk t) = 1 - u
    missing = float((weights * (1 - (1 - nodes) ** (safe / risk)) ** size).sum())
    rows = []
    for count, chance in ((1, 1 - missing), (0, missing)):
        for reward, p in world.risky if count else ((0.0, 1.0),):
            for others, q in _safe_rewards(world.safe, size - count):
                risky = (True,) * count + (False,) * (size - count)
                rows.append((risky, (reward,) * count + others, chance * p * q))
    risky_NK, rewards, chances = zip(*rows, strict=True)
    reward_NK, chance_N = (torch.tensor(x, dtype=torch.float64) for x in (rewards, chances))
    return Groups(torch.tensor(risky_NK), reward_NK, chance_N, as_sampled=False)


def _safe_rewards(safe: Chances, count: int) -> Iterator[tuple[tuple[float, ...], float]]:
    """Multisets of `count` rewards of safe answers, with their probabilities."""
    counts_NJ, orders_N = multisets(len(safe), count)
    for counts, orders in zip(counts_NJ.tolist(), orders_N.tolist(), strict=True):
        chance = math.exp(orders) * math.prod(p**n for (_, p), n in zip(safe, counts, strict=True))
        yield tuple(r for (r, _), n in zip(safe, counts, strict=True) for _ in range(int(n))), chance


@cache
def quantiles(count: int = 2000) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the midpoint rule on (0, 1), fine enough for six digits."""
    nodes = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return nodes, torch.full_like(nodes, 1 / count)


@dataclass(frozen=True)
class Source:
    """Groups of one world and one behaviour policy, and how likely they are."""

    chance: float
    groups: Groups
    sampled: float  # P(risky) of the behaviour policy
    wrong: float = 0.0  # nats by which the recorded log-probability of a risky answer is too high


@dataclass(frozen=True)
class Cell:
    """One cell of the table: rewards, data, K, and a form."""

    reward: str
    data: str
    size: int
    form: str

    @property
    def reference(self) -> float:
        """P(risky) of the reference."""
        return 0.1 if self.data == "copies" else 0.5

    @property
    def best(self) -> float:
        """P(risky) of the best policy."""
        return _chance(_logit(self.reference) - 1)

    @property
    def bias(self) -> float:
        """P(risky) where it settles, minus the best."""
        if self.data == "stale":
            return self.ended() - self.best
        if self.data == "top_p":
            return self.unseen() - UNSEEN
        fixed = {"fixed_9": 0.9, "fixed_1": 0.1}.get(self.data)
        return _chance(root(lambda x: self.slope(_chance(x), fixed or _chance(x)))) - self.best

    def ended(self, updates: int = 200, rate: float = 5.0, lag: int = 10) -> float:
        """P(risky) at the end of exact gradient steps on data of the policy `lag` updates ago, from 0.5."""
        past = [0.0]
        for _ in range(updates):
            behavior = past[max(0, len(past) - 1 - lag)]
            past.append(past[-1] + rate * self.slope(_chance(past[-1]), _chance(behavior)))
        return _chance(sum(past[-2 * lag :]) / (2 * lag))

    def unseen(self, updates: int = 200, rate: float = 5.0) -> float:
        """Returns the probability of an answer that is never sampled after exact gradient steps from `UNSEEN`.

        The two others are at their best, and share what pushes up as they share their probability.
        """
        shares_squared = self.best**2 + (1 - self.best) ** 2
        log_odds = _logit(
            UNSEEN
        )  # against the two others, of which the gradient of one moves all as their softmax has it
        for _ in range(updates):
            unseen = _chance(log_odds)
            log_odds -= rate * self._pushed_up(unseen) * (1 + shares_squared) * unseen
        return _chance(log_odds)

    def _pushed_up(self, unseen: float) -> float:
        """Returns the sum over rows of what is pushed up, on average, over K, at the best policy of those seen."""
        risk = self.best
        return sum(
            source.chance * source.groups.expected(up_NK, self.size)
            for source, up_NK in self._pushes(risk, self.sources(risk), scale=1 - unseen)
        )

    def sources(self, sampled: float) -> list[Source]:
        """Returns the groups that may come at P(risky) = `sampled` of the behaviour."""
        worlds, size = WORLDS[self.reward], self.size
        made: list[Source] = []
        for world in worlds:
            groups: list[Groups] = []
            match self.data:
                case "distinct":
                    groups = [distinct(world, size, sampled)]
                case "copies":
                    groups = without_copies(world, size, sampled)
                case "rejected" | "deadline":
                    share = 0.005 if self.data == "rejected" else 0.05  # of all at the best policy
                    groups = rejected(world, size, sampled, share * sampled / BEST)
                case "mixed":
                    groups = []
                case _:
                    groups = [independent(world, size, sampled, self.data == "selected")]
            wrong = WRONG if self.data == "recorded" else 0.0
            made += [Source(world.chance, one, sampled, wrong) for one in groups]
        if self.data == "mixed":
            other = REWARDS[(REWARDS.index(self.reward) + 1) % len(REWARDS)]
            for reward, behavior in ((self.reward, 0.95), (other, 0.05)):
                made += [Source(w.chance / 2, independent(w, size, behavior), behavior) for w in WORLDS[reward]]
        return made

    def slope(self, risk: float, sampled: float) -> float:
        """The expected slope in the logit of the risky answer, at P(risky) = `risk`, data of P(risky) = `sampled`.

        Safe ones among distinct answers are alike, so that this logit decides.
        """
        return sum(
            source.chance * source.groups.expected(up_NK * (source.groups.risky_NK.double() - risk), self.size)
            for source, up_NK in self._pushes(risk, self.sources(sampled))
        )

    def _pushes(self, risk: float, sources: Sequence[Source], scale: float = 1.0) -> Iterator[tuple[Source, Tensor]]:
        """Yields with each source how far the objective pushes up the log-probability of each row, times K.

        scale: of the probabilities of the policy, over those of a behaviour that leaves something out.
        """
        objective = FORMS[self.form]()
        made = [(source, *self._batch(source, risk, scale)) for source in sources]
        if not isinstance(objective, Asymmetric):
            for source, batch, log_policy_BT in made:
                yield source, _slopes(objective, source, batch, log_policy_BT)
            return
        objective.memory.means_2 = seen_2 = _seen(made)
        if self.data != "again":
            for source, batch, log_policy_BT in made:
                yield source, _slopes(objective, source, batch, log_policy_BT)
            return
        for source, batch, log_policy_BT in made:  # the push is proportional to c, which earlier uses of a group change
            objective.memory.means_2 = torch.zeros(2, dtype=torch.float64)
            none_NK = _slopes(objective, source, batch, log_policy_BT)
            objective.memory.means_2 = seen_2.clone()
            unit_NK = _slopes(objective, source, batch, log_policy_BT) - none_NK
            own_N2 = _group_means(source, batch, log_policy_BT)
            factor_N, means_N2 = torch.zeros_like(source.groups.chance_N), seen_2.expand_as(own_N2)
            for _ in range(USES):
                factor_N = factor_N + pushes(means_N2) / pushes(seen_2) / USES
                means_N2 = DECAY * means_N2 + (1 - DECAY) * own_N2
            yield source, none_NK + unit_NK * factor_N[:, None]

    def _batch(self, source: Source, risk: float, scale: float = 1.0) -> tuple[Batch, Tensor]:
        """Answers of one token, and their log-probabilities under the policy."""
        count, size = source.groups.reward_NK.shape
        risky_B = source.groups.risky_NK.flatten()
        share = 1 / self.size if self.data == "distinct" else 1.0  # of what is not risky, each safe answer

        def log(p: float) -> Tensor:
            return torch.where(risky_B, math.log(p), math.log((1 - p) * share)).double()[:, None]

        ones_B = torch.ones(count * size, dtype=torch.int64)
        batch = Batch(
            prompt_GP=torch.ones(count, 1, dtype=torch.int64),
            prompt_length_G=torch.ones(count, dtype=torch.int64),
            completion_BT=ones_B[:, None],
            length_B=ones_B,
            mask_BT=ones_B[:, None].bool(),
            log_reference_BT=log(self.reference),
            reward_B=source.groups.reward_NK.flatten(),
            group_B=torch.arange(count).repeat_interleave(size),
            log_behavior_BT=log(source.sampled) + source.wrong * risky_B.double()[:, None],
            as_sampled_G=torch.full((count,), source.groups.as_sampled),
        )
        return batch, log(risk) + math.log(scale)


def _slopes(objective: Objective, source: Source, batch: Batch, log_policy_BT: Tensor) -> Tensor:
    """[N, K]: how far each row is pushed up, times K."""
    log_policy_BT = log_policy_BT.detach().requires_grad_()
    loss, _ = objective(PolicyOutput(log_policy_BT), batch, 1)
    (slope_BT,) = torch.autograd.grad(loss, log_policy_BT)
    return -(slope_BT[:, 0] * batch.rows).view_as(source.groups.reward_NK)


def pushes(means_N2: Tensor) -> Tensor:
    """[N]: g q^2, to which c is proportional."""
    return means_N2[..., 0] * means_N2[..., 1].square()


def _advantages(batch: Batch, log_policy_BT: Tensor) -> Tensor:
    """[B]: what the form's memory sees of each row, in units of reward."""
    exact = TrajectoryBalance(Constant(BETA), off_policy="exact")
    log_B = log_policy_BT[:, 0]
    gap_B = batch.reward_B - BETA * (log_B - batch.log_reference_BT[:, 0])
    weight_B = exact.weight_B(gap_B, log_B - log_behavior(batch)[:, 0], batch)
    return gap_B - group_mean(weight_B * gap_B, batch.group_B, batch.groups)


def _group_means(source: Source, batch: Batch, log_policy_BT: Tensor) -> Tensor:
    """[N, 2]: g and q of each group; q of a group without a spread is 0."""
    low_B, q_B, _ = above_lowest(_advantages(batch, log_policy_BT), batch)
    return torch.stack([x.view_as(source.groups.reward_NK)[:, 0].double() for x in (low_B, q_B)], 1)


def _seen(made: Sequence[tuple[Source, Batch, Tensor]]) -> Tensor:
    """The means that the form's memory has after long: g, and q among groups with a spread."""
    sums_3 = torch.zeros(3, dtype=torch.float64)
    for source, batch, log_policy_BT in made:
        columns = (
            x.double().view_as(source.groups.reward_NK) for x in above_lowest(_advantages(batch, log_policy_BT), batch)
        )
        expected = [source.groups.expected(x_NK, x_NK.shape[1]) for x_NK in columns]
        sums_3 += source.chance * torch.tensor(expected, dtype=torch.float64)
    return torch.stack([sums_3[0], sums_3[1] / sums_3[2].clamp(min=1e-12)])


def root(f: Callable[[float], float], low: float = -7.0, high: float = 7.0) -> float:
    """Where a function that falls from `low` to `high` is zero, by regula falsi with halving (Illinois); an end if it
    has one sign.
    """
    at_low, at_high = f(low), f(high)
    if at_low <= 0 or at_high >= 0:
        return low if at_low <= 0 else high
    for _ in range(60):
        x = (low * at_high - high * at_low) / (at_high - at_low)
        y = f(x)
        if abs(y) < 1e-9 or high - low < 1e-7:
            break
        if y > 0:
            low, at_low, at_high = x, y, at_high / 2
        else:
            high, at_high, at_low = x, y, at_low / 2
    return x


def _chance(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def largest(rows: Sequence[tuple[str, str, str, int, str]], forms: Sequence[str]) -> str:
    """By data and form over all rewards and K, with its sign."""
    lines = [f"| data | {' | '.join(forms)} |", f"|{'---|' * (1 + len(forms))}"]
    for data in dict.fromkeys(row[2] for row in rows):
        found = [max((float(r[4]) for r in rows if (r[2], r[0]) == (data, form)), key=abs) for form in forms]
        lines.append(f"| {data} | {' | '.join(f'{x:+.3f}' for x in found)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS), choices=REWARDS)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--groups", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"| rewards | data | K | {' | '.join(given.forms)} |\n|{'---|' * (3 + len(given.forms))}")
    for reward, data, size in product(given.rewards, given.data, given.groups):
        found = [Cell(reward, data, size, form).bias for form in given.forms]
        print(f"| {reward} | {data} | {size} | {' | '.join(f'{x:+.3f}' for x in found)} |", flush=True)
        rows += [(form, reward, data, size, f"{x:.5f}") for form, x in zip(given.forms, found, strict=True)]
    print(f"\nThe largest distance:\n\n{largest(rows, given.forms)}")
    if given.csv is not None:
        with given.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("variant", "rewards", "data", "K", "bias"), *rows])


if __name__ == "__main__":
    main()
