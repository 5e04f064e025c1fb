"""The quickstart over seeds: held-out accuracy before and after, idle and paced shares, reuse, lag, time.

python benchmarks/quickstart_seeds.py [--seeds 5] [--first 0] [--out FILE] [--field value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GREEDY, SAMPLED = "pass@1/greedy", "pass@1/sampled"


def one(seed: int, folder: Path, fields: list[str]) -> dict[str, Any]:
    """One run's summary."""
    name = f"seed-{seed}"
    command = [sys.executable, "-m", "tba", "train", "quickstart", "--runs", str(folder), "--run-name", name]
    done = subprocess.run([*command, "--seed", str(seed), *fields], capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads((folder / name / "summary.json").read_text())


def row(summary: dict[str, Any]) -> dict[str, float]:
    """The figures of one run."""
    values = {m: [e["value"] for e in summary["evaluations"] if e["metric"] == m] for m in (GREEDY, SAMPLED)}
    tokens, trajectories = summary["tokens"], summary["trajectories"]
    accounted = ("trained_once", "waiting", "evicted", "rejected", "duplicate", "in_flight_at_stop")
    return {
        "before sampled": values[SAMPLED][0],
        "after sampled": values[SAMPLED][-1],
        "before greedy": values[GREEDY][0],
        "after greedy": values[GREEDY][-1],
        "idle + paced": summary["trainer_idle"] + summary["trainer_paced"],
        "mean uses": summary["samples_per_insert"],
        "share trained": tokens["trained_once"] / tokens["generated"],
        "mean lag": summary["lag"]["mean"],
        "seconds": summary["wall_seconds"]["total"],
        "ledger difference": tokens["generated"]
        - sum(tokens[t] for t in accounted)
        + trajectories["generated"]
        - sum(trajectories[t] for t in accounted),
    }


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path)
    arguments, fields = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            rows.append(row(one(seed, Path(folder), fields)))
            print(f"seed {seed}: " + ", ".join(f"{k} {v:.3f}" for k, v in rows[-1].items()), flush=True)
    for name in rows[0]:
        found = [r[name] for r in rows]
        print(f"{name:18} median {statistics.median(found):9.3f}   worst to best {min(found):9.3f} .. {max(found):.3f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
