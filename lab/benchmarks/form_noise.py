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
The memory of `asymmetric` is normally distributed, as after many batches of 7 groups.
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
from tba.objectives.trajectory_balance import DECAY, ERRORS, Asymmetric, TrajectoryBalance, slant_B
from tba.protocols import Objective, PolicyOutput
from tba.replay.buffer import RARE_SHARE
from tba.schedules import Constant
from tba_lab.tb_forms import LeastVarianceBalance, lowered

BETA = 0.05
BEST = 1 / (1 + math.e)
UNSEEN_CHANCE = 0.08  # of the policy, in the data `top_p`
RECORDING_ERROR = 0.05  # nats
GROUP_USES = 3  # of a group, in the data `again`
BATCH_GROUPS = 7  # groups of a batch, whose mean slant the form `asymmetric` remembers; 1 in the data `again`
GROUP_SIZES = (4, 8, 20)
REWARDS = ("plus_minus", "zero_one", "world", "gaussian", "mostly")
DATA = (
    *("fresh", "stale", "fixed_9", "fixed_1", "distinct", "selected"),
    *("copies", "rejected", "deadline", "mixed", "again", "recorded", "top_p"),
)
FORMS: Mapping[str, Callable[[], Objective]] = {
    "none": lambda: TrajectoryBalance(Constant(BETA), off_policy="none"),
    "exact": lambda: TrajectoryBalance(Constant(BETA), off_policy="exact"),
    "least_variance": lambda: LeastVarianceBalance(Constant(BETA), off_policy="none"),
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

    def expected_sum(self, x_NK: Tensor, size: int) -> float:
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
    for count in range(size + 1):
        for counts in _compositions(kinds - 1, size - count):
            yield (count, *counts)


def independent_groups(world: World, size: int, risk: float, is_selected: bool = False) -> Groups:
    """Returns groups of independent answers, risky ones with probability `risk`."""
    (groups,) = with_rejections(world, size, risk, 0.0, is_selected)
    return groups


def with_rejections(world: World, size: int, risk: float, share: float, is_selected: bool = False) -> list[Groups]:
    """Returns groups of `size` answers less those that are rejected, by their number, which is below `size`.

    share: of all answers, how many are rejected; they are risky ones. A group with a rejected answer says so; all do
    where more than `RARE_SHARE` of all are, as in the buffer.
    """
    kinds = [(True, r, (risk - share) * p) for r, p in world.risky]
    kinds += [(False, r, (1 - risk) * p) for r, p in world.safe]
    weight_J = torch.tensor([p * (math.exp(r) if is_selected else 1.0) for _, r, p in kinds], dtype=torch.float64)
    risky_J = torch.tensor([is_risky for is_risky, _, _ in kinds])
    reward_J = torch.tensor([reward for _, reward, _ in kinds], dtype=torch.float64)
    groups = []
    for kept_count in range(size, 0 if share else size - 1, -1):
        rejected_count = size - kept_count
        counts_NJ, orders_N = multisets(len(kinds), kept_count)
        chance_J = weight_J * (1 - share) / weight_J.sum()
        log_out = 0.0
        if rejected_count:
            log_out = rejected_count * math.log(share) + math.log(math.comb(size, rejected_count))
        chance_N = (orders_N + torch.special.xlogy(counts_NJ, chance_J).sum(1) + log_out).exp()
        is_kept_N = chance_N > 1e-12  # of the rest there are a million at most
        if not is_kept_N.any():
            break
        counts_NJ, chance_N = counts_NJ[is_kept_N], chance_N[is_kept_N]
        bounds_NJ = counts_NJ.cumsum(1)
        kind_NK = (torch.arange(kept_count)[None, :, None] >= bounds_NJ[:, None, :]).sum(2)
        as_sampled = not is_selected and not rejected_count and share <= RARE_SHARE
        groups.append(Groups(risky_J[kind_NK], reward_J[kind_NK], chance_N, as_sampled))
    return groups


def groups_without_copies(world: World, size: int, risk: float) -> list[Groups]:
    """Returns groups of `size` answers of which the risky one is kept once; safe ones never repeat."""
    count = torch.arange(size + 1, dtype=torch.float64)
    orders = math.lgamma(size + 1) - torch.lgamma(count + 1) - torch.lgamma(size - count + 1)
    chances = (orders + torch.special.xlogy(count, risk) + torch.special.xlogy(size - count, 1 - risk)).exp().tolist()
    copies = sum((n - 1) * chance for n, chance in enumerate(chances) if n > 1) / size  # of all answers
    groups = []
    for n, chance in enumerate(chances):
        if chance < 1e-9:
            continue
        rows = []
        for reward, p in world.risky if n else ((0.0, 1.0),):
            for safe_rewards, q in _safe_rewards(world.safe, size - n):
                rows.append(((reward,) * min(n, 1) + safe_rewards, chance * p * q))
        rewards, chance_of = zip(*rows, strict=True)
        reward_NK, chance_N = (torch.tensor(x, dtype=torch.float64) for x in (rewards, chance_of))
        risky_NK = torch.zeros_like(reward_NK, dtype=torch.bool)
        risky_NK[:, : min(n, 1)] = True
        groups.append(Groups(risky_NK, reward_NK, chance_N, n < 2 and copies <= RARE_SHARE))
    return groups


def distinct_groups(world: World, size: int, risk: float) -> Groups:
    """Draws among one risky answer and `size` safe ones, equally likely, until `size` are different.

    Each answer rings at an exponential time at its own rate; the first `size` to ring are the group. The risky one is
    missing if all safe ones ring before it.
    """
    safe = (1 - risk) / size
    nodes, weights = quantiles()
    # the time at which the risky one rings, by its quantile u: exp(-risk t) = 1 - u
    missing_chance = float((weights * (1 - (1 - nodes) ** (safe / risk)) ** size).sum())
    rows = []
    for count, chance in ((1, 1 - missing_chance), (0, missing_chance)):
        for reward, p in world.risky if count else ((0.0, 1.0),):
            for safe_rewards, q in _safe_rewards(world.safe, size - count):
                risky = (True,) * count + (False,) * (size - count)
                rows.append((risky, (reward,) * count + safe_rewards, chance * p * q))
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
    behavior_risk: float  # P(risky) of the behaviour policy
    recording_error: float = 0.0  # nats by which the recorded log-probability of a risky answer is too high


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
    def best_risk(self) -> float:
        """P(risky) of the best policy."""
        return _chance(_logit(self.reference) - 1)

    @property
    def bias(self) -> float:
        """P(risky) where it settles, minus the best."""
        if self.data == "stale":
            return self.end_risk() - self.best_risk
        if self.data == "top_p":
            return self.unseen_chance() - UNSEEN_CHANCE
        fixed_risk = {"fixed_9": 0.9, "fixed_1": 0.1}.get(self.data)
        return _chance(find_root(lambda x: self.slope(_chance(x), fixed_risk or _chance(x)))) - self.best_risk

    def end_risk(self, updates: int = 200, rate: float = 5.0, lag: int = 10) -> float:
        """P(risky) at the end of exact gradient steps on data of the policy `lag` updates ago, from 0.5."""
        past = [0.0]
        for _ in range(updates):
            behavior = past[max(0, len(past) - 1 - lag)]
            past.append(past[-1] + rate * self.slope(_chance(past[-1]), _chance(behavior)))
        return _chance(sum(past[-2 * lag :]) / (2 * lag))

    def unseen_chance(self, updates: int = 200, rate: float = 5.0) -> float:
        """Returns the probability of an answer that is never sampled after exact gradient steps from `UNSEEN`.

        The two others are at their best, and share what pushes up as they share their probability.
        """
        shares_squared = self.best_risk**2 + (1 - self.best_risk) ** 2
        log_odds = _logit(
            UNSEEN_CHANCE
        )  # against the two others, of which the gradient of one moves all as their softmax has it
        for _ in range(updates):
            unseen = _chance(log_odds)
            log_odds -= rate * self._total_push(unseen) * (1 + shares_squared) * unseen
        return _chance(log_odds)

    def _total_push(self, unseen: float) -> float:
        """Returns the sum over rows of what is pushed up, on average, over K, at the best policy of those seen."""
        risk = self.best_risk
        return sum(
            source.chance * source.groups.expected_sum(up_NK, self.size)
            for source, up_NK in self._pushes(risk, self.sources(risk), scale=1 - unseen)
        )

    def sources(self, behavior_risk: float) -> list[Source]:
        """Returns the groups that may come at P(risky) = `behavior_risk` of the behaviour."""
        worlds, size = WORLDS[self.reward], self.size
        sources: list[Source] = []
        for world in worlds:
            groups: list[Groups] = []
            match self.data:
                case "distinct":
                    groups = [distinct_groups(world, size, behavior_risk)]
                case "copies":
                    groups = groups_without_copies(world, size, behavior_risk)
                case "rejected" | "deadline":
                    share = 0.005 if self.data == "rejected" else 0.05  # of all at the best policy
                    groups = with_rejections(world, size, behavior_risk, share * behavior_risk / BEST)
                case "mixed":
                    groups = []
                case _:
                    groups = [independent_groups(world, size, behavior_risk, self.data == "selected")]
            recording_error = RECORDING_ERROR if self.data == "recorded" else 0.0
            sources += [Source(world.chance, group_set, behavior_risk, recording_error) for group_set in groups]
        if self.data == "mixed":
            other_reward = REWARDS[(REWARDS.index(self.reward) + 1) % len(REWARDS)]
            for reward, behavior in ((self.reward, 0.95), (other_reward, 0.05)):
                for world in WORLDS[reward]:
                    sources.append(Source(world.chance / 2, independent_groups(world, size, behavior), behavior))
        return sources

    def slope(self, risk: float, behavior_risk: float) -> float:
        """Returns the expected slope in the logit of the risky answer, at P(risky) = `risk`, data at `behavior_risk`.

        Safe ones among distinct answers are alike, so that this logit decides.
        """
        return sum(
            source.chance * source.groups.expected_sum(up_NK * (source.groups.risky_NK.double() - risk), self.size)
            for source, up_NK in self._pushes(risk, self.sources(behavior_risk))
        )

    def _pushes(self, risk: float, sources: Sequence[Source], scale: float = 1.0) -> Iterator[tuple[Source, Tensor]]:
        """Yields with each source how far the objective pushes up the log-probability of each row, times K.

        scale: of the probabilities of the policy, over those of a behaviour that leaves something out.
        """
        objective = FORMS[self.form]()
        batches = [(source, *self._batch(source, risk, scale)) for source in sources]
        if not isinstance(objective, Asymmetric):
            for source, batch, log_policy_BT in batches:
                yield source, _slopes(objective, source, batch, log_policy_BT)
            return
        slants = [_slants(source, batch, log_policy_BT) for source, batch, log_policy_BT in batches]
        mean, deviation = _moments([source for source, _, _ in batches], slants)
        # c is a positive part, so that what the memory has by chance does not cancel
        uses, groups = (GROUP_USES, 1) if self.data == "again" else (1, BATCH_GROUPS)
        error = deviation * math.sqrt((1 - DECAY) / (1 + DECAY) / groups)  # as the memory has it
        deviation *= (1 - DECAY**uses) / math.sqrt((1 - DECAY ** (2 * uses)) * groups)
        for (source, batch, log_policy_BT), slant_N in zip(batches, slants, strict=True):
            none_NK, unit_NK = (self._with_push(c, source, batch, log_policy_BT) for c in (0.0, 1.0))
            c_N, mean_N, noise = torch.zeros_like(slant_N), torch.full_like(slant_N, mean), deviation
            for _ in range(uses):
                c_N = c_N + _expected_positive(-mean_N - ERRORS * error, noise) / uses
                mean_N, noise = DECAY * mean_N + (1 - DECAY) * slant_N, DECAY * noise  # a group knows itself
            yield source, none_NK + (unit_NK - none_NK) * c_N[:, None]

    def _with_push(self, c: float, source: Source, batch: Batch, log_policy_BT: Tensor) -> Tensor:
        """[N, K]: how far each row is pushed up, times K, where the memory gives `c`."""
        objective = FORMS[self.form]()
        assert isinstance(objective, Asymmetric)
        objective.memory.moments_2 = torch.tensor([-c, c * c], dtype=torch.float64)
        return _slopes(objective, source, batch, log_policy_BT)

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
            log_behavior_BT=log(source.behavior_risk) + source.recording_error * risky_B.double()[:, None],
            as_sampled_G=torch.full((count,), source.groups.as_sampled),
        )
        return batch, log(risk) + math.log(scale)


def _slopes(objective: Objective, source: Source, batch: Batch, log_policy_BT: Tensor) -> Tensor:
    """[N, K]: how far each row is pushed up, times K."""
    log_policy_BT = log_policy_BT.detach().requires_grad_()
    loss, _ = objective(PolicyOutput(log_policy_BT), batch, 1)
    (slope_BT,) = torch.autograd.grad(loss, log_policy_BT)
    return -(slope_BT[:, 0] * batch.rows).view_as(source.groups.reward_NK)


def _slants(source: Source, batch: Batch, log_policy_BT: Tensor) -> Tensor:
    """[N]: the slant of each group, in units of reward, as the form's memory has it."""
    exact = TrajectoryBalance(Constant(BETA), off_policy="exact")
    log_B = log_policy_BT[:, 0]
    gap_B = batch.reward_B / BETA - (log_B - batch.log_reference_BT[:, 0])
    weight_B = exact.weight_B(gap_B, log_B - log_behavior(batch)[:, 0], batch)
    return BETA * slant_B(gap_B, weight_B, PolicyOutput(log_policy_BT), batch).view_as(source.groups.reward_NK)[:, 0]


def _moments(sources: Sequence[Source], slants: Sequence[Tensor]) -> tuple[float, float]:
    """Mean and deviation of the slant over the groups that come as sampled, which the memory counts; 0 without any."""
    chances = torch.cat([s.chance * s.groups.chance_N * s.groups.as_sampled for s in sources])
    slant = torch.cat(list(slants))
    total = chances.sum().clamp(min=1e-12)
    mean = float(chances @ slant / total)
    return mean, math.sqrt(max(0.0, float(chances @ slant.square() / total) - mean**2))


def _expected_positive(mean_N: Tensor, deviation: float) -> Tensor:
    """[N]: E max(0, x) of a normally distributed x."""
    if deviation == 0:
        return mean_N.clamp(min=0)
    z_N = mean_N / deviation
    return mean_N * torch.special.ndtr(z_N) + deviation * torch.exp(-z_N.square() / 2) / math.sqrt(2 * math.pi)


def find_root(f: Callable[[float], float], low: float = -7.0, high: float = 7.0) -> float:
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


def largest_biases(rows: Sequence[tuple[str, str, str, int, str]], forms: Sequence[str]) -> str:
    """By data and form over all rewards and K, with its sign."""
    lines = [f"| data | {' | '.join(forms)} |", f"|{'---|' * (1 + len(forms))}"]
    for data in dict.fromkeys(row[2] for row in rows):
        biases = [max((float(r[4]) for r in rows if (r[2], r[0]) == (data, form)), key=abs) for form in forms]
        lines.append(f"| {data} | {' | '.join(f'{x:+.3f}' for x in biases)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS), choices=REWARDS)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--groups", nargs="+", type=int, default=list(GROUP_SIZES))
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"| rewards | data | K | {' | '.join(options.forms)} |\n|{'---|' * (3 + len(options.forms))}")
    for reward, data, size in product(options.rewards, options.data, options.groups):
        biases = [Cell(reward, data, size, form).bias for form in options.forms]
        print(f"| {reward} | {data} | {size} | {' | '.join(f'{x:+.3f}' for x in biases)} |", flush=True)
        rows += [(form, reward, data, size, f"{x:.5f}") for form, x in zip(options.forms, biases, strict=True)]
    print(f"\nThe largest distance:\n\n{largest_biases(rows, options.forms)}")
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("variant", "rewards", "data", "K", "bias"), *rows])


if __name__ == "__main__":
    main()
