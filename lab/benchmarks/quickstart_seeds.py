"""The quickstart over seeds: held-out accuracy, staleness of the data and its effects, reuse, time.

    python lab/benchmarks/quickstart_seeds.py [--seeds 5] [--first 0] [--slowed 5] [--out FILE] [--field value ...]

With --slowed N each searcher runs for one N-th of the time only: from the first step until the trainer is done it is
stopped and continued, twenty times a second.

`recent` is the share of groups that were of the newest arrivals, `lag` updates between sampling and training, `ess` the
mean effective sample size of a batch, `lowest reward` the lowest mean of ten steps in the second half, `lowest on the
way` the lowest held-out accuracy of the second half (of 500 problems), all of one run. `answers to 80 %` and `seconds
to 80 %` are those that had been written, and that had passed since training began, where the line between two held-out
figures (sampled) crosses 80 %; `--evaluation.every 10` makes it a fine line. PYTHONPATH chooses the code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parts import parts_of

GREEDY, SAMPLED = "pass@1/greedy", "pass@1/sampled"
PERIOD = 0.05  # seconds of a searcher's turn to run and to stand still


def one(seed: int, folder: Path, slowed: float, fields: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run's summary and metrics."""
    name = f"seed-{seed}"
    command = [sys.executable, "-m", "tba", "train", "quickstart", "--runs", str(folder), "--run-name", name]
    command += ["--seed", str(seed), *fields]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if slowed > 1:
        slow_down(driver, slowed, folder / name / "metrics.jsonl")
    output, _ = driver.communicate(timeout=3600)
    if driver.returncode:
        raise SystemExit(output)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / name / "summary.json").read_text()), [json.loads(line) for line in lines]


def slow_down(driver: subprocess.Popen[str], times: float, metrics: Path) -> None:
    """Let the searchers of a run stand still for all but one part in `times` of the time, from step to last step."""
    while driver.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(PERIOD)
    searchers = {p: name for name, p in parts_of(driver.pid).items() if name.startswith("searcher")}
    while driver.poll() is None and "trainer" in parts_of(driver.pid):
        for number, share in ((signal.SIGCONT, 1 / times), (signal.SIGSTOP, 1 - 1 / times)):
            for process in searchers:
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    continue
            time.sleep(PERIOD * share)
    for process in searchers:
        try:
            os.kill(process, signal.SIGCONT)
        except ProcessLookupError:
            continue


def reached(evaluations: list[dict[str, Any]], steps: list[dict[str, Any]], target: float = 0.8) -> tuple[float, float]:
    """Answers that had been written, and seconds of training, where sampled accuracy first was `target`; NaN: never."""
    by_step = {int(step["step"]): step for step in steps}
    first_step, before = steps[0], None
    for evaluation in (e for e in evaluations if e["metric"] == SAMPLED):
        at = by_step.get(int(evaluation["version"].split(".")[1]), first_step)
        now = (evaluation["value"], at["journal_rows"], max(0.0, at["wall_seconds"] - first_step["wall_seconds"]))
        if before is not None and now[0] >= target:
            share = (target - before[0]) / (now[0] - before[0])
            return before[1] + share * (now[1] - before[1]), before[2] + share * (now[2] - before[2])
        before = now
    return math.nan, math.nan


def row(summary: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of one run."""
    evaluations = summary["evaluations"]
    values = {m: [e["value"] for e in evaluations if e["metric"] == m] for m in (GREEDY, SAMPLED)}
    tokens, trajectories = summary["tokens"], summary["trajectories"]
    accounted = ("trained_once", "waiting", "evicted", "rejected", "duplicate", "in_flight_at_stop")
    half = [step["reward"] for step in steps[len(steps) // 2 :]]
    answers, seconds = reached(evaluations, steps)
    last, groups = steps[-1], steps[-1]["groups_recent"] + steps[-1]["groups_reward"]
    return {
        "before sampled": values[SAMPLED][0],
        "after sampled": values[SAMPLED][-1],
        "before greedy": values[GREEDY][0],
        "after greedy": values[GREEDY][-1],
        "answers to 80 %": answers,
        "seconds to 80 %": seconds,
        "lowest on the way": min(values[SAMPLED][len(values[SAMPLED]) // 2 :]),
        "lowest reward": min(statistics.fmean(half[i : i + 10]) for i in range(len(half) - 9)),
        "recent": last.get("groups_newest", last["groups_recent"]) / groups,
        "mean lag": summary["lag"]["mean"],
        "most lag": summary["lag"]["max"],
        "ess": statistics.fmean(step["ess"] for step in steps),
        "idle + paced": summary["trainer_idle"] + summary["trainer_paced"],
        "mean uses": summary["samples_per_insert"],
        "share trained": tokens["trained_once"] / tokens["generated"],
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
    parser.add_argument("--slowed", type=float, default=1.0, help="how many times slower searchers are")
    parser.add_argument("--out", type=Path)
    arguments, fields = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            rows.append(row(*one(seed, Path(folder), arguments.slowed, fields)))
            print(f"seed {seed}: " + ", ".join(f"{k} {v:.3f}" for k, v in rows[-1].items()), flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    for name in rows[0]:
        figures = [r[name] for r in rows]
        print(
            f"{name:18} mean {statistics.fmean(figures):9.3f}   median {statistics.median(figures):9.3f}   "
            f"lowest to highest {min(figures):9.3f} .. {max(figures):.3f}"
        )


if __name__ == "__main__":
    main()
