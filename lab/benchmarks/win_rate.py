"""Whether the win rate rose, paired by held-out prompt, over runs of several seeds.

    python lab/benchmarks/win_rate.py studies/summaries/runs/tb-0.3-0 studies/summaries/runs/tb-0.3-1 ...

Each run's first and last evaluation answer the same prompts (the recipe has to record them all,
`EvaluationSettings(logged_problems=...)`).
The interval is Student's t over prompts of the mean change over runs; the base's own answers are sampled in each run.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from tba.evaluation.estimators import SAMPLED, mean_interval, paired_difference
from tba.record.run_record import RunRecord


def wins(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Prompt -> 1 or 0, before and after."""
    by_side: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for before, after in RunRecord.read(path).answers_before_after():
        for side, answer in zip(by_side, (before, after), strict=True):
            if answer.metric == SAMPLED:
                side[answer.prompt] = float(answer.correct)
    return by_side


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    by_prompt: dict[str, list[tuple[float, float]]] = defaultdict(list)
    runs = parser.parse_args().runs
    for path in runs:
        before, after = wins(path)
        rates = " -> ".join(f"{100 * np.mean(list(side.values())):.1f} %" for side in (before, after))
        print(f"{path.name}: {rates} of {len(after)} prompts")
        for prompt, won in after.items():
            by_prompt[prompt].append((before[prompt], won))
    means = np.array([np.mean(pairs, axis=0) for pairs in by_prompt.values()])
    for name, values in (("before", means[:, 0]), ("after", means[:, 1])):
        i = mean_interval(values)
        print(f"{name:6} {100 * i.estimate:5.1f} % [{100 * i.low:.1f}, {100 * i.high:.1f}]")
    d = paired_difference(means[:, 0], means[:, 1])
    print(f"change {100 * d.estimate:+5.1f} points [{100 * d.low:+.1f}, {100 * d.high:+.1f}], {len(runs)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
