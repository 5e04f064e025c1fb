"""Learning from long answers whose ratios are noisy, on a policy that is known exactly: by length and form.

    python lab/benchmarks/long_learning.py [--seeds 5] [--updates 300]

An answer is one choice of ten, of which one is right, and n more tokens that matter to nobody. The choice is linear in
32 random features of its prompt (64 prompts), so that prompts disturb each other. Reward 1 for the right choice, else
0, one in twenty the other way round; beta 0.05; a uniform reference. An update: 16 groups of 8 answers, half of them
from the policy of up to 10 updates ago, half from up to 100 ago. The n tokens add to an answer's log rho a normal
variable of mean -s^2 / 2 and variance s^2, as in long_answers.py:

    bfloat16   s^2 = n 0.012^2: an engine in bfloat16 and its trainer at equal weights
    float32    s^2 = n 0.003^2
    drift      s^2 = 2 n 0.0005: every answer is by a policy that far away in nats a token

Forms: `exact` and `asymmetric` (the default) by the ratio of the whole answer, `root` by its power of 1 / sqrt n,
`token` by the choice's own ratio, as weights of single tokens have it here (all of the gradient is in that token; cap
1.28, the paper's), and `none`. Adam, each form at the best of six rates at n = 0, by the mean of the seeds 100 to 102,
which are not counted; a best rate at the grid's edge is marked. Printed: the policy's probability of the right choice,
mean over prompts, after the last update, mean and worst seed; updates to 0.8, of the median seed (-: never); the
largest fall in points of any seed after that.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import torch

from tba.batch import Batch
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective, PolicyOutput
from tba.schedules import Constant
from tba_lab.tb_forms import WeightedBalance

PROMPTS, FEATURES, CHOICES, GROUPS, K = 64, 32, 10, 16, 8
BETA = Constant(0.05)
RATES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
TUNED_ON = (100, 101, 102)
VARIANCES: dict[str, Callable[[int], float]] = {
    "bfloat16": lambda n: n * 0.012**2,
    "float32": lambda n: n * 0.003**2,
    "drift": lambda n: 2 * n * 0.0005,
}
LENGTHS = (200, 2000, 8000)
FORMS: dict[str, Callable[[], Objective]] = {
    "asymmetric": lambda: TrajectoryBalance(BETA).start(),
    "exact": lambda: TrajectoryBalance(BETA, off_policy="exact"),
    "root": lambda: WeightedBalance(BETA, "ratio", cap=8.0, normalised=True),  # of log rho / sqrt n
    "token": lambda: WeightedBalance(BETA, "ratio", cap=1.28),  # of the choice's own log rho
    "none": lambda: TrajectoryBalance(BETA, off_policy="none"),
}


@dataclass(frozen=True)
class Curve:
    """Probability of the right choice after each update."""

    values: tuple[float, ...]

    @property
    def last(self) -> float:
        return self.values[-1]

    def first(self, target: float = 0.8) -> float:
        """The first update with at least `target`; infinite if there is none."""
        return next((n + 1 for n, value in enumerate(self.values) if value >= target), math.inf)

    def fall(self) -> float:
        """How far it falls below what it had been, once 0.8 was reached."""
        highest = largest = 0.0
        for value in self.values if self.first() == math.inf else self.values[int(self.first()) - 1 :]:
            highest = max(highest, value)
            largest = max(largest, highest - value)
        return largest


def learn(form: str, variance: float, length: int, rate: float, seed: int, updates: int) -> Curve:
    """Train a policy from zeros, and return its curve."""
    generator = torch.Generator().manual_seed(seed)
    features_PF = torch.randn(PROMPTS, FEATURES, generator=generator, dtype=torch.float64) / math.sqrt(FEATURES)
    right_P = torch.randint(CHOICES, (PROMPTS,), generator=generator)
    table = torch.zeros(FEATURES, CHOICES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=rate)
    objective = FORMS[form]()
    versions = [table.detach().clone()]
    curve = []
    group_B = torch.arange(GROUPS).repeat_interleave(K)
    ones_B = torch.ones(GROUPS * K, dtype=torch.int64)
    for step in range(1, updates + 1):
        prompt_G = torch.randint(PROMPTS, (GROUPS,), generator=generator)
        back_G = torch.rand(GROUPS, generator=generator) * torch.tensor([10.0, 100.0]).repeat(GROUPS // 2)
        behind_G = [versions[max(0, len(versions) - 1 - int(back))] for back in back_G]
        sampled_GV = torch.stack(
            [(features_PF[p] @ v).log_softmax(0) for p, v in zip(prompt_G.tolist(), behind_G, strict=True)]
        )
        choice_B = torch.multinomial(sampled_GV.exp(), K, replacement=True, generator=generator).flatten()
        flipped_B = torch.rand(GROUPS * K, generator=generator) < 0.05
        reward_B = ((choice_B == right_P[prompt_G[group_B]]) ^ flipped_B).double()
        noise_B = torch.randn(GROUPS * K, generator=generator, dtype=torch.float64)
        log_policy_B = (features_PF[prompt_G] @ table).log_softmax(1)[group_B, choice_B]
        log_rho_B = log_policy_B.detach() - sampled_GV[group_B, choice_B]
        if form != "token":
            log_rho_B = log_rho_B + math.sqrt(variance) * noise_B - variance / 2
        if form == "root":
            log_rho_B = log_rho_B / math.sqrt(max(1, length))
        batch = Batch(
            prompt_GP=torch.ones(GROUPS, 1, dtype=torch.int64),
            prompt_length_G=torch.ones(GROUPS, dtype=torch.int64),
            completion_BT=ones_B[:, None],
            length_B=ones_B,
            mask_BT=ones_B[:, None].bool(),
            log_reference_BT=torch.full((GROUPS * K, 1), -math.log(CHOICES), dtype=torch.float64),
            reward_B=reward_B,
            group_B=group_B,
            log_behavior_BT=(log_policy_B.detach() - log_rho_B)[:, None],
        )
        loss, _ = objective(PolicyOutput(log_policy_B[:, None]), batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        versions = [*versions[-100:], table.detach().clone()]
        curve.append(float((features_PF @ versions[-1]).softmax(1)[torch.arange(PROMPTS), right_P].mean()))
    return Curve(tuple(curve))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates = {}
    for form in FORMS:
        accuracies = {r: fmean(learn(form, 0.0, 0, r, seed, options.updates).last for seed in TUNED_ON) for r in RATES}
        rates[form] = max(accuracies, key=lambda rate: accuracies[rate])
    edge = {form: " (edge)" if rate in (RATES[0], RATES[-1]) else "" for form, rate in rates.items()}
    print("rates: " + ", ".join(f"{form} {rate:g}{edge[form]}" for form, rate in rates.items()) + "\n")
    print("| what differs | tokens | form | right, % | worst | updates to 80 % | largest fall |\n" + "|---" * 7 + "|")
    cases = [("nothing", 0, 0.0)] + [(difference, n, of(n)) for difference, of in VARIANCES.items() for n in LENGTHS]
    for difference, length, variance in cases:
        for form, rate in rates.items():
            curves = [learn(form, variance, length, rate, seed, options.updates) for seed in range(options.seeds)]
            last = [curve.last for curve in curves]
            first_step = median(curve.first() for curve in curves)
            first_text = f"{first_step:.0f}" if math.isfinite(first_step) else "-"
            cells = (
                f"{100 * fmean(last):.1f}",
                f"{100 * min(last):.1f}",
                first_text,
                f"{100 * max(c.fall() for c in curves):.1f}",
            )
            print(f"| {difference} | {length:,} | {form} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
