"""Asynchronous against synchronous, one recipe, one machine, seeds interleaved: wall-clock to 80 % sampled accuracy.

    python lab/benchmarks/async_speedup.py [--seeds 5] [--slow-judge] [--out FILE]

Both sides are `tba train quickstart` by settings alone: `processes` (one searcher, one trainer, one thread each)
against `inline` on-policy (k = 1, m = 1) with its best thread count. Evaluation stops the synchronous clock; the
asynchronous side evaluates on its searcher. Next to the ratio are this machine's limit, (g + t) / max(g, t), and the
share of the ideal throughput 1 / max(g, t) that the asynchronous side reached; g and t are the seconds of generating
and of training per step, measured on one thread in the same run. Both clocks start at the first optimizer step, so
that start-up, the first evaluation and the first round count on neither side.

`--slow-judge`: grading an answer takes 200 ms, 16 at once per searcher, on both sides; four searchers, at most two mean
uses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tba.evaluation.estimators import mean_interval

TARGET = 0.80
SAMPLED = "pass@1/sampled"
EVALUATION = [
    *("--evaluation.every", "20", "--evaluation.problems", "500", "--evaluation.problems-during", "0"),
    *("--evaluation.no-greedy", "--evaluation.pass-k", "0"),
]
BARE = ["--evaluation.every", "0", "--evaluation.problems", "20", "--evaluation.pass-k", "0"]
SYNCHRONOUS = [
    *("--runtime", "inline", "--sync-every", "1", "--replay.selection.m", "1"),
    *("--replay.pacing.warm-up", "0"),
]
SHORT_WARM_UP = ["--replay.pacing.warm-up", "280"]  # two rounds: what is made before the clock starts is a gift


@dataclass(frozen=True)
class Outcome:
    """One run, from its own summary and metrics."""

    seconds_to_target: float | None  # since the first optimizer step, evaluation apart; None: never
    seconds_per_step: float  # after warm-up, evaluation apart
    generating: float  # g, seconds per step the trainer stood still for a round (synchronous)
    training: float  # t, seconds per step of training
    uses: float
    final: float


def run(recipe: str, side: str, arguments: list[str], folder: Path) -> Outcome:
    """One `tba train`, in a process of its own."""
    command = [sys.executable, "-m", "tba", "train", recipe, "--runs", str(folder), "--run-name", side, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    path = folder / side
    summary = json.loads((path / "summary.json").read_text())
    result = json.loads((path / "logs" / "trainer.result.json").read_text())
    trainer, began = result["clock"], result["warm_up_seconds"]
    figures = [e for e in summary["evaluations"] if e["metric"] == SAMPLED]
    steps = summary["steps"]
    busy, idle = trainer.get("busy", 0.0), trainer.get("idle", 0.0) + trainer.get("paced", 0.0)
    return Outcome(
        seconds_to_target=reached([(max(0.0, e["wall_seconds"] - began), e["value"]) for e in figures]),
        seconds_per_step=(busy + idle) / steps,
        generating=idle / steps,
        training=busy / steps,
        uses=summary["samples_per_insert"],
        final=figures[-1]["value"],
    )


def reached(curve: list[tuple[float, float]]) -> float | None:
    """Seconds to TARGET, linear between evaluations."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y1 >= TARGET:
            return x0 + (x1 - x0) * max(0.0, TARGET - y0) / max(y1 - y0, 1e-9)
    return None


def best_threads(recipe: str, steps: int, folder: Path) -> int:
    """The synchronous side's better thread count of 1 and 2, by a short run of each."""
    outcomes = {}
    for threads in (1, 2):
        arguments = [*SYNCHRONOUS, *BARE, "--steps", str(steps), "--run.threads", str(threads)]
        outcomes[threads] = run(recipe, f"threads-{threads}", arguments, folder)
    for threads, outcome in outcomes.items():
        print(f"synchronous, {threads} thread(s): {1000 * outcome.seconds_per_step:.0f} ms per step", flush=True)
    return min(outcomes, key=lambda threads: outcomes[threads].seconds_per_step)


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--slow-judge", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    slow = arguments.slow_judge
    recipe = str(Path(__file__).parent / "slow_judge.py") if slow else "quickstart"
    evaluation = [] if slow else EVALUATION
    extra = ["--searchers", "4", "--replay.pacing.max-mean-uses", "2"] if slow else SHORT_WARM_UP
    sides: dict[str, list[Outcome]] = {"async": [], "sync": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        threads = best_threads(recipe, 8 if slow else 40, folder)
        alone = run(recipe, "one", [*SYNCHRONOUS, *BARE, "--steps", "8" if slow else "60"], folder)
        settings = {"async": extra, "sync": [*SYNCHRONOUS, "--run.threads", str(threads)]}
        for seed in range(arguments.seeds):
            for side, side_flags in settings.items():
                common = ["--seed", str(seed), "--steps", str(arguments.steps), *evaluation]
                outcome = run(recipe, f"{side}-{seed}", [*common, *side_flags], folder)
                sides[side].append(outcome)
                print(f"seed {seed} {side:5} {outcome}", flush=True)
    report(sides, alone, threads, arguments.out)


def report(sides: dict[str, list[Outcome]], alone: Outcome, threads: int, out: Path | None) -> None:
    """The figures that are asked for."""
    pairs = [(a.seconds_to_target, s.seconds_to_target) for a, s in zip(sides["async"], sides["sync"], strict=True)]
    ratios = np.array([s / a for a, s in pairs if a and s])
    g, t = alone.generating, alone.training
    per_step = statistics.median(o.seconds_per_step for o in sides["async"])
    ideal, uses = max(g, t), [o.uses for o in sides["async"]]
    facts = {
        "seconds_to_80": pairs,
        "speedup_median": float(np.median(ratios)) if len(ratios) else None,
        "speedup": [float(r) for r in ratios],
        "sync_threads": threads,
        "g": g,
        "t": t,
        "limit": (g + t) / ideal,
        "async_seconds_per_step": per_step,
        "share_of_ideal": ideal / per_step,
        "async_uses": uses,
        "final": {side: [o.final for o in outcomes] for side, outcomes in sides.items()},
    }
    if len(ratios):
        i = mean_interval(ratios)
        print(f"\nsync / async wall-clock to {TARGET:.0%}: mean {i.estimate:.2f}x [{i.low:.2f}, {i.high:.2f}]", end="")
        print(f", median {np.median(ratios):.2f}x, {len(ratios)} of {len(pairs)} seeds reached it on both sides")
    print(f"g = {1000 * g:.0f} ms, t = {1000 * t:.0f} ms per step on one thread: limit {facts['limit']:.2f}x")
    print(f"async: {1000 * per_step:.0f} ms per step, {ideal / per_step:.0%} of the ideal throughput 1 / max(g, t)")
    print(f"mean uses, async: {statistics.median(uses):.2f}")
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
