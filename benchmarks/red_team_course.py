"""The course of a red-teaming run in the small world: what its new attacks achieved over time, from its journal.

    tba train red_team_small --seed 100 --runtime inline --run.inline-rounds-per-sync 4 --run-name NAME [--field ...]
    python benchmarks/red_team_course.py runs/NAME [--parts 6]

It prints a line for each part of the run: attacks sampled by the weights of these steps, the share that succeeded, how
many families have successes, their effective number (exp of the entropy), and the share of successes outside of all
families (which the victim was not trained to answer unsafely). No text is printed.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from tba.apps.red_team.trigger_world import TriggerWorld
from tba.replay.follower import JournalFollower
from tba.types import Trajectory


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--parts", type=int, default=6)
    arguments = parser.parse_args()
    with JournalFollower(arguments.run / "journal.sqlite") as journal:
        attacks = journal.drain()
    by_step: dict[int, list[Trajectory]] = defaultdict(list)
    for attack in attacks:
        if attack.completion.versions[0].incarnation >= 0:  # not what was taken in before the run
            by_step[attack.completion.versions[0].step].append(attack)
    for steps in np.array_split(sorted(by_step), min(arguments.parts, len(by_step))):
        part = [attack for step in steps.tolist() for attack in by_step[step]]
        print(f"steps {steps[0]:4} to {steps[-1]:4}: {line(part)}")


def line(attacks: list[Trajectory]) -> str:
    """What these achieved."""
    world = TriggerWorld()
    won = [world.family(a.completion.text) for a in attacks if a.reward_parts.get("success")]
    counts = Counter(family for family in won if family is not None)
    share = np.array(list(counts.values())) / max(sum(counts.values()), 1)
    even = float(np.exp(-(share * np.log(share)).sum())) if counts else 0.0
    return (
        f"{len(attacks):5,} attacks, {len(won) / len(attacks):6.1%} succeed, of {len(counts):2} families as even as "
        f"{even:4.1f}, {won.count(None) / max(len(won), 1):4.0%} of none"
    )


if __name__ == "__main__":
    main()
