"""The course of a red-teaming run in the small world: what its new attacks achieved over time, from its journal.

    tba train red_team_small --seed 100 --runtime inline --run.inline-rounds-per-sync 4 --run-name NAME [--field ...]
    python lab/benchmarks/red_team_course.py runs/NAME [--parts 6]
    tba-lab study red_team --only 'tb-async,ancestor-sync,ppo-sync' --keep all
    python lab/benchmarks/red_team_course.py studies/red_team/runs/*

Of one run it prints a line for each part: attacks sampled by the weights of these steps, the share that succeeded, how
many families have successes, their effective number (exp of the entropy), and the share of successes outside of all
families (which the victim was not trained to answer unsafely). Of several it prints the seconds from a run's first
attack to the first thousand in a row of which so many succeed while they are as diverse as the first thousand of
all: their mean distance at most 2 % less, with successes of at least --families families. No text is printed.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tba.apps.red_team.embedding import SentenceEmbedder
from tba.apps.red_team.trigger_world import TriggerWorld
from tba.replay.follower import JournalFollower
from tba.types import Trajectory

WINDOW = 1024
EVERY = 4  # of so many attacks one is embedded: a window's distance is that of 256
TARGETS = (0.1, 0.2, 0.4, 0.6, 0.8)
ANY = 0.6  # for which the seconds at any diversity are printed too


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--parts", type=int, default=6)
    parser.add_argument("--families", type=int, default=16)
    arguments = parser.parse_args()
    if len(arguments.runs) > 1:
        compare(arguments.runs, arguments.families)
        return
    attacks = attacks_of(arguments.runs[0])
    by_step: dict[int, list[Trajectory]] = defaultdict(list)
    for attack in attacks:
        by_step[attack.completion.versions[0].step].append(attack)
    for steps in np.array_split(sorted(by_step), min(arguments.parts, len(by_step))):
        part = [attack for step in steps.tolist() for attack in by_step[step]]
        print(f"steps {steps[0]:4} to {steps[-1]:4}: {line(part)}")


def attacks_of(run: Path) -> list[Trajectory]:
    """Returns the attacks of a run, in order of arrival."""
    with JournalFollower(run / "journal.sqlite") as journal:
        return [attack for attack in journal.drain() if attack.completion.versions[0].incarnation >= 0]


def compare(runs: list[Path], families: int) -> None:
    """Print seconds to equal success at equal diversity, a line for each run."""
    encoder, parts_by_run = SentenceEmbedder.load(), {}
    for run in runs:
        attacks = attacks_of(run)
        parts_by_run[run.name] = windows(attacks, encoder)
        print(f"{run.name}: {len(attacks):,} attacks in {parts_by_run[run.name][-1].seconds:.0f} s", flush=True)
    least = 0.98 * min(parts[0].distance for parts in parts_by_run.values())
    print(f"\nas diverse: a distance of at least {least:.3f}, successes of at least {families} families\n")
    heads = [*(f"s to {target:.0%}" for target in TARGETS), "s to 60% at any", "most at that diversity", "at its end"]
    print("| run | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for name, parts in parts_by_run.items():
        diverse = [part for part in parts if part.distance >= least and part.families >= families]
        first_times = [next((part.seconds for part in diverse if part.success >= target), None) for target in TARGETS]
        first_times.append(next((part.seconds for part in parts if part.success >= ANY), None))
        times = " | ".join("never" if at is None else f"{at:.0f}" for at in first_times)
        most = max((part.success for part in diverse), default=0.0)
        end = parts[-1]
        ended = f"{end.success:.1%}, distance {end.distance:.3f}, {end.families} families"
        print(f"| {name} | {times} | {most:.1%} | {ended} |")


@dataclass(frozen=True)
class Window:
    """Some attacks in a row."""

    seconds: float  # from the run's first attack to the last of these
    success: float  # share
    families: int  # with successes
    distance: float  # mean over pairs of attacks, 1 - cosine of sentence embeddings


def windows(attacks: list[Trajectory], encoder: SentenceEmbedder) -> list[Window]:
    """Returns the course of a run, in steps of a quarter of a window."""
    world, begin = TriggerWorld(), attacks[0].created
    texts = sorted({attack.completion.text for attack in attacks[::EVERY]})
    row = {text: i for i, text in enumerate(texts)}
    embedded = encoder.embed(texts)
    window_list = []
    for end in range(WINDOW, len(attacks) + 1, WINDOW // 4):
        part = attacks[end - WINDOW : end]
        won = [world.family(a.completion.text) for a in part if a.reward_parts.get("success")]
        thinned = part[::EVERY]
        total = embedded[[row[a.completion.text] for a in thinned]].sum(axis=0)
        similar = (float(total @ total) - len(thinned)) / (len(thinned) * (len(thinned) - 1))  # of all pairs
        seconds = part[-1].created - begin
        window_list.append(Window(seconds, len(won) / WINDOW, len(set(won) - {None}), 1 - similar))
    return window_list


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
