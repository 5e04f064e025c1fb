"""Whole-answer ratios on long answers: effective sample size, bias and what a gradient is worth, by length.

    python lab/benchmarks/long_answers.py [--groups 20000] [--plot FILE.png]

An answer decides once, between the risky and the safe answer of `form_noise.py` (1 with 95 %, else -1, against 0.95;
beta 0.05; the best policy takes the risk with P = 0.269), and goes on for n tokens that matter to nobody. Their log rho
adds up to a normal variable of mean -s^2 / 2 and variance s^2: rho has the mean 1, as any ratio of two distributions.

    bfloat16   s^2 = n 0.012^2: an engine in bfloat16 and its trainer at equal weights, measured on a GPU
    float32    s^2 = n 0.003^2
    drift      s^2 = 2 n KL, with a KL of 0.0005 nats a token between behaviour and policy

Forms: `exact` and `asymmetric` (ratio of whole answers, capped at 8, spread at most 2 nats in a group), `root` (the
ratio to the power of 1 / sqrt n), `token` (each token's own ratio, as in the paper's clamp: n factors near 1, averaged
by the sum over tokens; it does not see the decision's ratio). `asymmetric` pushes up by c = 0.1 here. Groups of 8. ESS
and the groups that are worth one group of short answers (the variance of a group's slope over its squared mean) are of
fresh data, biases of data of which 50 or 90 % take the risk, for ever. Drawn with one seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import torch
from form_noise import BEST, BETA, find_root
from torch import Tensor

from tba.batch import Batch
from tba.objectives.trajectory_balance import CAP, TrajectoryBalance
from tba.protocols import Objective, PolicyOutput
from tba.schedules import Constant
from tba_lab.tb_forms import WeightedBalance

LENGTHS = (0, 200, 2000, 8000)
SPREADS: dict[str, Callable[[int], float]] = {
    "bfloat16": lambda n: 0.012 * math.sqrt(n),
    "float32": lambda n: 0.003 * math.sqrt(n),
    "drift": lambda n: math.sqrt(2 * n * 0.0005),
}
FORMS = ("exact", "asymmetric", "root", "token")
PUSH = 0.1  # c of `asymmetric` here, in units of reward: twice the gap between the two answers
K = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = (
        "what differs",
        "tokens",
        "s, nats",
        "above the cap",
        "form",
        "ESS",
        "bias from 50 %",
        "from 90 %",
        "groups for 1",
    )
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    curves: dict[str, list[tuple[int, float, float]]] = {}
    short = {form: Case(form, 0, 0.0, options.groups).worth() for form in FORMS}
    for difference, spread in SPREADS.items():
        for length in LENGTHS if difference == "bfloat16" else LENGTHS[1:]:
            for form in FORMS:
                s = spread(length)
                case = Case(form, length, s, options.groups)
                ess, biases, worth = case.ess(), [case.bias(sampled) for sampled in (0.5, 0.9)], case.worth()
                capped = 1 - NormalDist().cdf(math.log(CAP) / s + s / 2) if s else 0.0
                cells = (
                    difference,
                    f"{length:,}",
                    f"{s:.2f}",
                    f"{capped:.1%}",
                    form,
                    f"{ess:.2f}",
                    *(f"{b:.3f}" for b in biases),
                )
                print(f"| {' | '.join(cells)} | {short[form] / worth:.2f} |", flush=True)
                curves.setdefault(f"{difference}, {form}", []).append((length, ess, biases[1]))
    if options.plot is not None:
        draw(curves, options.plot)


class Case:
    """One form at one length, on groups that are drawn once."""

    def __init__(self, form: str, length: int, spread: float, groups: int) -> None:
        self.form, self.spread, self.groups = form, spread, groups
        generator = torch.Generator().manual_seed(0)
        self.uniform_B = torch.rand(groups * K, generator=generator, dtype=torch.float64)
        self.luck_B = torch.rand(groups * K, generator=generator, dtype=torch.float64)
        noise_B = torch.randn(groups * K, generator=generator, dtype=torch.float64)
        self.log_rho_B = spread * noise_B - spread**2 / 2
        self.power = 1 / math.sqrt(max(1, length)) if form == "root" else 0.0 if form == "token" else 1.0

    def objective(self) -> Objective:
        if self.form in ("exact", "asymmetric"):
            return TrajectoryBalance(Constant(BETA), off_policy="exact")
        return WeightedBalance(Constant(BETA), "ratio", cap=CAP, normalised=True)  # of log rho times the power

    def slopes(self, risk: float, sampled: float, mean_reward: bool) -> tuple[Tensor, float]:
        """[G] each group's slope in the logit of the risky answer, downhill, and the mean ESS of the weights."""
        risky_B = self.uniform_B < sampled
        reward_B = torch.where(risky_B, 0.9 if mean_reward else torch.where(self.luck_B < 0.95, 1.0, -1.0), 0.95)

        def log(p: float) -> Tensor:
            return torch.where(risky_B, math.log(p), math.log(1 - p)).double()[:, None]

        ones_B = torch.ones(len(risky_B), dtype=torch.int64)
        rho_B1 = (log(risk) - log(sampled)) * (self.power if self.form != "token" else 0.0)
        rho_B1 = rho_B1 + (self.log_rho_B * self.power)[:, None]
        batch = Batch(
            prompt_GP=torch.ones(self.groups, 1, dtype=torch.int64),
            prompt_length_G=torch.ones(self.groups, dtype=torch.int64),
            completion_BT=ones_B[:, None],
            length_B=ones_B,
            mask_BT=ones_B[:, None].bool(),
            log_reference_BT=log(0.5),
            reward_B=reward_B.double(),
            group_B=torch.arange(self.groups).repeat_interleave(K),
            log_behavior_BT=log(risk) - rho_B1,
        )
        log_policy_B1 = log(risk).requires_grad_()
        loss, _ = self.objective()(PolicyOutput(log_policy_B1), batch, 1)
        (slope_B1,) = torch.autograd.grad(loss, log_policy_B1)
        push_B = -slope_B1[:, 0] * batch.rows * (risky_B.double() - risk)
        weight_B = rho_B1[:, 0].clamp(max=math.log(CAP)).exp()
        if self.form in ("exact", "asymmetric"):
            weight_B = TrajectoryBalance(Constant(BETA)).weight_B(reward_B.double(), rho_B1[:, 0], batch)
        weight_GK = weight_B.view(-1, K)
        ess = float((weight_GK.mean(1).square() / weight_GK.square().mean(1)).mean())
        return push_B.view(-1, K).mean(1), ess

    def ess(self) -> float:
        """On fresh data, as a share."""
        return self.slopes(0.5, 0.5, mean_reward=True)[1]

    def bias(self, sampled: float) -> float:
        """P(risky) where it settles on data of so many risky answers, minus the best; mean rewards, as all are linear.

        The push up is in closed form, so that nothing of the draws is in it.
        """

        def slope(x: float) -> float:
            risk = 1 / (1 + math.exp(-x))
            exact = float(self.slopes(risk, sampled, mean_reward=True)[0].mean())
            if self.form != "asymmetric":
                return exact
            arms = ((sampled, risk, 1 - risk), (1 - sampled, 1 - risk, -risk))
            return exact + PUSH * sum(
                mu * capped_mean(math.log(pi / mu), self.spread) * score for mu, pi, score in arms
            )

        return 1 / (1 + math.exp(-find_root(slope))) - BEST

    def worth(self) -> float:
        """The squared mean of a group's slope over its variance, at P(risky) 0.5, fresh data, rewards as drawn."""
        slope_G, _ = self.slopes(0.5, 0.5, mean_reward=False)
        true = float(self.slopes(0.5, 0.5, mean_reward=True)[0].mean())
        return true**2 / float(slope_G.var())


def capped_mean(log_ratio: float, spread: float) -> float:
    """The mean of min(rho, 8), log rho normal about `log_ratio` - spread^2 / 2."""
    if spread == 0:
        return min(math.exp(log_ratio), CAP)
    above = (math.log(CAP) - log_ratio) / spread
    below = NormalDist().cdf(above - spread / 2)
    return math.exp(log_ratio) * below + CAP * (1 - NormalDist().cdf(above + spread / 2))


def draw(curves: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    """ESS and bias against length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left_axes, right = figure.subplots(1, 2)
    for difference in SPREADS:
        lengths, ess, _ = zip(*curves[f"{difference}, exact"], strict=True)
        left_axes.plot(lengths, ess, marker="o", label=difference)
        lengths, _, bias = zip(*curves[f"{difference}, asymmetric"], strict=True)
        right.plot(lengths, bias, marker="o", label=f"asymmetric, {difference}")
    right.axhline(0.0, color="black", linewidth=0.8, label="exact, root, token")
    left_axes.set(xlabel="tokens", ylabel="effective sample size", ylim=(0, 1.05))
    right.set(xlabel="tokens", ylabel="P(risky) - best, data of 90 % risky")
    left_axes.legend()
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
