"""Summaries before and after training, side by side: wins by a judge, with and without what length explains.

    python lab/benchmarks/summaries.py posts.jsonl before.jsonl after.jsonl --judge judge --judge marks [--csv FILE]
    python lab/benchmarks/summaries.py pairs held.jsonl --judge marks --judge judge

The two files are of `tba eval summaries --texts`. A judge is a folder of `tba reward-model`; a win is a summary that it
scores above the base's summary of the same post (a tie is half of one). *Nearly equal long* are the pairs within a
tenth in words; *length-controlled* is the win rate at equal length by a logistic regression on the difference of
log-lengths (Dubois et al., arXiv 2404.04475, in its simplest form). Intervals are Student's t over pairs. The second
form says how often a judge prefers a post's own summary to another post's of equal length (post_pairs.py).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tba.apps.preference.reward_model import ModelScore
from tba.apps.preference.tldr import Tldr
from tba.evaluation.estimators import Interval, mean_interval
from tba.settings import find

Floats = npt.NDArray[np.float64]
NEAR = 0.1


def answers(path: Path, documents: Sequence[str]) -> dict[str, list[str]]:
    """Post -> the answers to it, in their order."""
    by_document: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_document[max((d for d in documents if d in row["prompt"]), key=len)].append(row["response"].strip())
    return by_document


def scored(judge: str, pairs: list[tuple[str, str]]) -> Floats:
    """A score for each (post, summary); a summary that cannot be read has less than all others."""
    marks = ModelScore(judge, None).scores(pairs)
    return np.array([-np.inf if mark is None else mark for mark in marks])


def wins(before: Floats, after: Floats) -> Floats:
    return (after > before) + 0.5 * (after == before)


def at_equal_length(won: Floats, log_ratio: Floats) -> float:
    """P(win | equal length): logistic regression of wins on the log-ratio of lengths, by Newton's method."""
    x = np.stack([np.ones_like(log_ratio), log_ratio / max(log_ratio.std(), 1e-9)], 1)
    w = np.zeros(2)
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ w))
        w += np.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]) + 1e-3 * np.eye(2), x.T @ (won - p) - 1e-3 * w)
    return float(1 / (1 + np.exp(-w[0])))


def controlled(won: Floats, log_ratio: Floats, draws: int = 2000) -> Interval:
    rng = np.random.default_rng(0)
    picked = (rng.integers(0, len(won), len(won)) for _ in range(draws))
    estimates = [at_equal_length(won[i], log_ratio[i]) for i in picked]
    low, high = np.percentile(estimates, [2.5, 97.5])
    return Interval(at_equal_length(won, log_ratio), float(low), float(high))


def percent(i: Interval) -> str:
    return f"{100 * i.estimate:.1f} % [{100 * i.low:.1f}, {100 * i.high:.1f}]"


def compare(posts: Path, before: Path, after: Path, judges: list[str], out: Path | None) -> None:
    task = find("summaries").task
    assert isinstance(task, Tldr)
    documents = [str(p.fields["document"]) for p in replace(task, path=str(posts)).problems("eval")]
    old, new = (answers(path, documents) for path in (before, after))
    pairs = [(post, a, b) for post in old for a, b in zip(old[post], new[post], strict=True)]
    length = np.array([[len(a.split()), len(b.split())] for _, a, b in pairs], float).clip(0.5)
    ratio = np.log(length[:, 1] / length[:, 0])
    is_similar_length = np.abs(length[:, 1] - length[:, 0]) <= NEAR * length.max(1)
    words = length.mean(0)
    print(f"{len(pairs)} pairs of {len(old)} posts; words {words[0]:.1f} before, {words[1]:.1f} after")
    rows = []
    for judge in judges:
        a, b = (scored(judge, [(post, pair[side]) for post, *pair in pairs]) for side in (0, 1))
        won = wins(a, b)
        row = {
            "all": mean_interval(won),
            "nearly equal long": mean_interval(won[is_similar_length]),
            "length-controlled": controlled(won, ratio),
        }
        print(f"{Path(judge).name}: score {a.mean():.2f} -> {b.mean():.2f}")
        for name, interval in row.items():
            count = int(is_similar_length.sum()) if name == "nearly equal long" else len(won)
            print(f"  wins, {name:18} {percent(interval)} of {count}")
            rows.append(
                [
                    after.stem,
                    Path(judge).name,
                    name,
                    count,
                    *(round(v, 4) for v in (interval.estimate, interval.low, interval.high)),
                    *length.mean(0).round(2),
                ]
            )
    if out is not None:
        new_file = not out.exists()
        with out.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new_file:
                writer.writerow(("run", "judge", "pairs", "n", "wins", "low", "high", "words_before", "words_after"))
            writer.writerows(rows)


def validate(file: Path, judges: list[str]) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for judge in judges:
        chosen, rejected = (scored(judge, [(r["prompt"], r[side]) for r in rows]) for side in ("chosen", "rejected"))
        by_post: dict[str, list[float]] = defaultdict(list)
        for row, won in zip(rows, wins(rejected, chosen), strict=True):
            by_post[row["prompt"]].append(float(won))
        right = mean_interval(np.array([np.mean(v) for v in by_post.values()]))
        print(f"{Path(judge).name}: {percent(right)} of {len(rows)} pairs of {len(by_post)} posts in the right order")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="POSTS BEFORE AFTER, or `pairs` FILE")
    parser.add_argument("--judge", action="append", required=True)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    if options.files[0] == "pairs" and len(options.files) == 2:
        validate(Path(options.files[1]), options.judge)
    elif len(options.files) == 3:
        posts, before, after = map(Path, options.files)
        compare(posts, before, after, options.judge, options.csv)
    else:
        parser.error("give POSTS BEFORE AFTER, or `pairs` and a file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
