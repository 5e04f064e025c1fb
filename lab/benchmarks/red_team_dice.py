"""How much of the spread of a red-teaming reward is the attack's, and how much the victim's dice.

    python lab/benchmarks/red_team_dice.py attacks.jsonl --victim smollm2 --classifier toxicity [--attacks 128]

Each attack is answered four times. The attack's variance of log P(toxic) is the covariance of the means of two answers
and of the other two; its share is that over the variance of a single answer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import WordClassifier
from tba.apps.red_team.victim import ModelVictim
from tba.recipes.red_team_smollm2 import recipe
from tba.tasks.problem_rows import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--victim", required=True)
    parser.add_argument("--classifier", required=True)
    parser.add_argument("--attacks", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = recipe.task
    assert isinstance(task, RedTeam)
    assert isinstance(task.victim, ModelVictim)
    victim = replace(task.victim, path=options.victim, dtype="bfloat16", device="cpu")
    reward = replace(task, victim=victim, classifier=WordClassifier(options.classifier), count=4).reward()
    attacks = [row.text("attack") for row in read_rows(options.file)][: options.attacks]
    marks = np.array(reward.scores(attacks))
    variance = float(np.cov(marks[:, :2].mean(1), marks[:, 2:].mean(1))[0, 1])
    print(f"{len(attacks)} attacks: one answer's log P(toxic) has a standard deviation of {marks.std():.2f} nats")
    print(f"the attack's share of its variance {variance / marks.var():.0%}, or {max(variance, 0.0) ** 0.5:.2f} nats")


if __name__ == "__main__":
    main()
