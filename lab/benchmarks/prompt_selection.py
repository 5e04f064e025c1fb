"""What choosing prompts saves: the quickstart's sums, with so few problems that each is answered many times.

    python lab/benchmarks/prompt_selection.py [--seeds 3] [--prompts 300] [--steps 300] [--out FILE] [--field value ...]

For one seed after the other, all three selections: uniform, epochs, posterior. Groups are small (16 of 8 instead of 7
of 20), since 20 answers to one of these sums are hardly ever all right or all wrong. The inline runtime alternates, so
that all selections generate equally many groups; their tokens differ a little, and accuracy is compared after equal
generated tokens, by interpolation between evaluations on held-out problems. It prints, over seeds:

- varied: the share of generated groups with both right and wrong answers, the only ones that teach something; over the
  run, and over its second half;
- sampled accuracy after as many tokens as the shortest run generated;
- tokens: the share of uniform's tokens after which its final accuracy was first reached (`never` counts as more
  than 1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tba.record.evaluations import read_evaluations
from tba.replay.follower import JournalFollower
from tba.types import Trajectory

SELECTIONS = ("uniform", "epochs", "posterior")
SAMPLED = "pass@1/sampled"


@dataclass(frozen=True)
class Outcome:
    """One run: its groups in the order of generation, and accuracy over generated tokens."""

    selection: str
    seed: int
    varied: float  # share of the groups
    varied_later: float  # of those of the second half
    tokens: Sequence[int]  # generated before each evaluation
    accuracy: Sequence[float]

    def after(self, tokens: float) -> float:
        """Accuracy, interpolated."""
        return float(np.interp(tokens, self.tokens, self.accuracy))

    def reached(self, accuracy: float) -> float | None:
        """Tokens after which this accuracy was there first, interpolated; None: never."""
        for i, (low, high) in enumerate(zip(self.accuracy, self.accuracy[1:], strict=False)):
            if low < accuracy <= high:
                share = (accuracy - low) / (high - low)
                return self.tokens[i] + share * (self.tokens[i + 1] - self.tokens[i])
        return None


def run(selection: str, seed: int, arguments: argparse.Namespace, fields: list[str], folder: Path) -> Outcome:
    """One `tba train`, in a process of its own."""
    name = f"{selection}-{seed}"
    command = [sys.executable, "-m", "tba", "train", "quickstart", "--runs", str(folder), "--run-name", name]
    settings = {
        "--seed": seed,
        "--runtime": "inline",
        "--steps": arguments.steps,
        "--groups-per-step": 16,
        "--prompts-per-round": 16,
        "--group-size": 8,
        "--samples-per-prompt": 8,
        "--optimizer.schedule.stable": max(1, arguments.steps - 20 - arguments.steps // 4),
        "--optimizer.schedule.decay": arguments.steps // 4,
        "--prompts.selection": selection,
        "--prompts.limit": arguments.prompts,
        "--evaluation.every": max(1, arguments.steps // 10),
        "--evaluation.problems": arguments.problems,
        "--evaluation.problems-during": 0,
        "--evaluation.pass-k": 0,
    }
    flag_words = [text for flag, value in settings.items() for text in (flag, str(value))]
    done = subprocess.run(
        [*command, *flag_words, "--evaluation.no-greedy", *fields], capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return outcome(selection, seed, folder / name)


def outcome(selection: str, seed: int, path: Path) -> Outcome:
    """The figures of a run, from its journal and its evaluations."""
    with JournalFollower(path / "journal.sqlite") as journal:
        trajectories = journal.drain()
    groups: dict[tuple[int, str], list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault((t.provenance["round"], t.prompt.key), []).append(t)
    varied = [len({t.reward for t in group}) > 1 for group in groups.values()]
    evaluations = sorted((e for e in read_evaluations(path) if e.metric == SAMPLED), key=lambda e: e.version)
    return Outcome(
        selection,
        seed,
        statistics.mean(varied),
        statistics.mean(varied[len(varied) // 2 :]),
        [sum(t.length for t in trajectories if t.version < e.version) for e in evaluations],
        [e.value for e in evaluations],
    )


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean (lowest .. highest)."""
    low, high = min(values), max(values)
    return f"{statistics.mean(values):.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def report(outcomes: Sequence[Outcome]) -> None:
    """A line for each selection."""
    equal = min(o.tokens[-1] for o in outcomes)
    uniform = {o.seed: o for o in outcomes if o.selection == "uniform"}
    print(f"after {equal} generated tokens, {len(uniform)} seeds, mean (lowest .. highest):")
    for selection in SELECTIONS:
        runs = [o for o in outcomes if o.selection == selection]
        shares = [(o.reached(uniform[o.seed].after(equal)) or float("inf")) / uniform[o.seed].tokens[-1] for o in runs]
        finite = [share for share in shares if share <= 1]
        print(
            f"{selection:10} varied {spread([o.varied for o in runs])}, second half "
            f"{spread([o.varied_later for o in runs])}; accuracy {spread([o.after(equal) for o in runs])}; tokens to "
            f"uniform's {spread(finite, 2) if finite else 'never'}, {len(runs) - len(finite)} of {len(runs)} never",
            flush=True,
        )


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=300, help="problems of the training split")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--problems", type=int, default=2000, help="held-out problems of each evaluation")
    parser.add_argument("--out", type=Path, help="JSON file for the outcomes")
    arguments, fields = parser.parse_known_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for selection in SELECTIONS:
                outcomes.append(run(selection, seed, arguments, fields, Path(folder)))
                o = outcomes[-1]
                print(
                    f"seed {seed} {selection:10} varied {o.varied:.3f}, {o.tokens[-1]} tokens, "
                    f"accuracy {o.accuracy[0]:.3f} -> {o.accuracy[-1]:.3f}",
                    flush=True,
                )
    report(outcomes)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
