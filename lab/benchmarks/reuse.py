"""Accuracy at 1, 4 and 16 mean uses of each trajectory: the quickstart, k = 16, equal optimizer steps.

    python lab/benchmarks/reuse.py [--seeds 3] [--steps 320]

The inline runtime takes turns, so the mean uses are exact: 16 steps per sync, and 16, 4 or 1 searcher rounds of one
batch each between two syncs. What varies is how much is generated for the same number of updates.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from quickstart_seeds import one, row

K = 16


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=320)
    arguments = parser.parse_args()
    for uses in (1, 4, 16):
        fields = [
            *("--runtime", "inline", "--sync-every", str(K), "--run.inline-rounds-per-sync", str(K // uses)),
            *("--replay.pacing.warm-up", "0", "--replay.pacing.max-mean-uses", "1000"),
            *("--steps", str(arguments.steps), "--evaluation.every", "0"),
        ]
        with tempfile.TemporaryDirectory() as folder:
            rows = [row(*one(seed, Path(folder), 1.0, fields)) for seed in range(arguments.seeds)]
        after = sorted(r["after sampled"] for r in rows)
        print(
            f"mean uses {statistics.mean(r['mean uses'] for r in rows):5.2f}: sampled accuracy after "
            f"{arguments.steps} steps median {statistics.median(after):.3f} ({after[0]:.3f} .. {after[-1]:.3f}), "
            f"{len(rows)} seeds, {statistics.mean(r['seconds'] for r in rows):.0f} s each",
            flush=True,
        )


if __name__ == "__main__":
    main()
