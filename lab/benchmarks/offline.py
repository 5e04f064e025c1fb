"""Learning from imported answers of mixed quality: before, offline (no searcher at all), and with searchers.

    python lab/benchmarks/offline.py [--seeds 3] [--prompts 1500] [--answers 20] [--right 0.4] [--steps 300] [...]

The task is the quickstart's: three-digit sums, by a base that forgets carries. For each seed the script writes a file
of demonstrations that no policy sampled: several answers to each of some training problems, a share of them right; of
the wrong ones half forget carries (each with probability 0.55, as the base has learnt) and half have one wrong digit.
The file contains no rewards. The arms, each of N optimizer steps:

- offline: `tba train quickstart --offline --data FILE`: from the file alone, searchers only evaluate;
- then: `tba resume` of that run for N steps more, with a searcher;
- both: `tba train quickstart --data FILE`: the same file, and a searcher whose answers come on top;
- searchers: `tba train quickstart`: without the file.

Printed: accuracy on the 2,000 held-out problems before and after each, sampled at temperature 1 and greedy, by seed and
as mean (lowest .. highest); and what the searchers, and the file, add, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.recipes.quickstart import recipe
from tba.tasks.arithmetic import Arithmetic

ARMS = ("offline", "then", "both", "searchers")  # `then` goes on with the run of `offline`
COMPARED = (("offline", "then"), ("offline", "both"), ("searchers", "both"))  # the second over the first
METRICS = {"sampled": "pass@1/sampled", "greedy": "pass@1/greedy"}
FORGOTTEN = 0.55


def careless(task: Arithmetic, a: int, b: int, rng: random.Random) -> str:
    """The sum of somebody who forgets carries, as the task writes it."""
    total, carry = 0, 0
    for place in range(task.digits):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        total += column % 10 * 10**place
        carry = int(column >= 10 and rng.random() >= FORGOTTEN)
    return task.format_result(total + carry * 10**task.digits)


def slipped(answer: str, rng: random.Random) -> str:
    """One digit is another."""
    place = rng.randrange(len(answer))
    digit = (int(answer[place]) + rng.randrange(1, 10)) % 10
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def demonstrations(path: Path, prompts: int, answers: int, right: float, seed: int) -> float:
    """Writes the file; the share of its answers that are right (some careless ones are, by luck)."""
    task = recipe.task
    assert isinstance(task, Arithmetic)
    rng = random.Random(seed)
    problems = rng.sample(list(task.problems("train")), prompts)
    correct = 0
    with path.open("w") as file:
        for problem in problems:
            text, answer = str(problem.prompt), str(problem.fields["answer"])
            a, b = (int(number) for number in text.rstrip("=").split("+"))
            for _ in range(answers):
                draw = rng.random()
                if draw < right:
                    response = answer
                else:
                    response = careless(task, a, b, rng) if draw < (1 + right) / 2 else slipped(answer, rng)
                correct += response == answer
                file.write(json.dumps({"prompt": text, "response": response, "source": "offline.py"}) + "\n")
    return correct / (prompts * answers)


def run(arm: str, seed: int, steps: int, data: Path, folder: Path, fields: Sequence[str]) -> dict[str, float]:
    """One run's accuracy before and after, in a process of its own."""
    path = folder / f"{'offline' if arm == 'then' else arm}-{seed}"
    if arm == "then":
        command = ["resume", path, "--no-offline"]
        steps, decay = 2 * steps, max(1, steps // 3)
    else:
        command = ["train", "quickstart", "--runs", folder, "--run-name", path.name, "--seed", seed]
        decay = max(1, steps // 3)
    settings = ["--steps", steps, "--evaluation.every", 0, "--evaluation.pass-k", 0]
    settings += ["--optimizer.schedule.stable", max(1, steps - 20 - decay), "--optimizer.schedule.decay", decay]
    settings += ["--data", data] if arm in ("offline", "both") else []
    settings += ["--offline"] if arm == "offline" else []
    words = [sys.executable, "-m", "tba", *map(str, [*command, *settings]), *fields]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    row = {"seconds": summary["wall_seconds"]["total"], "uses": summary["samples_per_insert"]}
    for short, metric in METRICS.items():
        values = [e["value"] for e in summary["evaluations"] if e["metric"] == metric]
        row |= {f"{short} before": values[0], f"{short} after": values[-1]}
    return row


def spread(values: Sequence[float]) -> str:
    """Mean (lowest .. highest) in percent."""
    low, high = min(values), max(values)
    return f"{100 * statistics.mean(values):.1f} % ({100 * low:.1f} .. {100 * high:.1f})"


def report(rows: dict[str, list[dict[str, float]]]) -> None:
    """Means over seeds, and what searchers add."""
    every = [row for arm in rows.values() for row in arm]
    for short in METRICS:
        print(f"{short:8} before     {spread([row[f'{short} before'] for row in every])}")
        for arm, arm_rows in rows.items():
            print(f"{short:8} {arm:10} {spread([row[f'{short} after'] for row in arm_rows])}")
        for less, larger in COMPARED:
            if rows.get(less) and len(rows[less]) == len(rows.get(larger, [])):
                key = f"{short} after"
                gains = [m[key] - n[key] for m, n in zip(rows[larger], rows[less], strict=True)]
                print(f"{short:8} {larger} over {less}: {spread(gains)} points")


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=1500, help="training problems in the file")
    parser.add_argument("--answers", type=int, default=20, help="answers to each of them")
    parser.add_argument("--right", type=float, default=0.4, help="share of the answers that are right")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--arms", default=",".join(ARMS), help="which arms, separated by commas")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments, fields = parser.parse_known_args()
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in arguments.arms.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            data = Path(folder) / f"demonstrations-{seed}.jsonl"
            share = demonstrations(data, arguments.prompts, arguments.answers, arguments.right, seed)
            count = arguments.prompts * arguments.answers
            print(
                f"seed {seed}: {count} answers to {arguments.prompts} problems, {100 * share:.1f} % right", flush=True
            )
            for arm, arm_rows in rows.items():
                arm_rows.append(run(arm, seed, arguments.steps, data, Path(folder), fields))
                print(f"  {arm:10} " + ", ".join(f"{k} {v:.3f}" for k, v in arm_rows[-1].items()), flush=True)
    report(rows)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
