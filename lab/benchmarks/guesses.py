"""Mean guesses of the recipe `guess_number` at each evaluation of a run, with 95 % intervals.

    tba train guess_number --run-name guess-0 --seed 0
    python lab/benchmarks/guesses.py runs/guess-0 [RUN ...] [--csv FILE]

A number that is not found counts as the most guesses, 20. All runs are asked for the same held-out numbers, during the
run for fewer than before and after.
"""

from __future__ import annotations

import argparse
import csv
from itertools import groupby
from pathlib import Path

import numpy as np

from tba.environments.guess_number import BEST, GUESSES
from tba.record.run_record import RunRecord

COLUMNS = ("variant", "step", "seconds", "numbers", "guesses", "low", "high", "not_found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--csv", type=Path, help="where to write the figures, a line per evaluation")
    options = parser.parse_args()
    rows = [row for run in options.runs for row in figures(run)]
    print(f"| run | step | seconds | numbers | mean guesses (halving: {BEST}) | not found, % |")
    print("|---|---|---|---|---|---|")
    for name, step, seconds, numbers, guesses, low, high, lost in rows:
        print(f"| {name} | {step} | {seconds:.0f} | {numbers} | {guesses} [{low}, {high}] | {100 * lost:.1f} |")
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((COLUMNS, *rows))


def figures(run: Path) -> list[tuple[str, int, float, int, float, float, float, float]]:
    """Returns the `COLUMNS` of each evaluation of a run, in order."""
    rows = []
    for version, answers in groupby(sorted(RunRecord.read(run).answers, key=lambda a: a.version), lambda a: a.version):
        version_answers = list(answers)
        rewards = np.array([a.reward for a in version_answers], dtype=np.float64)
        guesses = np.where(rewards > 0, 1 + GUESSES * (1 - rewards), GUESSES)
        mean, half = guesses.mean(), 1.96 * guesses.std(ddof=1) / len(version_answers) ** 0.5
        means = (round(float(x), 2) for x in (mean, mean - half, mean + half))
        lost = round(float((rewards == 0).mean()), 4)
        rows.append(
            (run.name, version.step, round(version_answers[0].wall_seconds, 1), len(version_answers), *means, lost)
        )
    return rows


if __name__ == "__main__":
    main()
