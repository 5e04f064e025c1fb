"""Searcher scaling: the same run with 1, 2, 4 and 8 searchers against a victim that takes 1 s a call, 8 at once.

    python lab/benchmarks/red_team_searchers.py --world red_team_world [--steps 300] [--searchers 1,2,4,8] [--repeats 1]
                                            [--out FILE]

It prints a row for each: trajectories per minute from the first optimizer step to the last, CPU time of the trainer's
thread per step (other programs do not affect it, unlike wall-clock time), successful attacks in replay at the end, how
many of the world's families they cover, and the mean distance between all attacks. With more than one repeat the
numbers of searchers alternate. `--world` is a folder made by `tba red-team world`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from slow_endpoint import serve

from tba.apps.red_team.embedding import SentenceEmbedder
from tba.apps.red_team.trigger_world import TriggerWorld
from tba.evaluation.estimators import mean_distance
from tba.replay.follower import JournalFollower

RECIPE = Path(__file__).parent / "red_team_endpoint.py"


@dataclass(frozen=True)
class Row:
    """What one run found."""

    searchers: int
    per_minute: float  # trajectories
    trainer_cpu_ms: float  # median over steps
    trainer_idle: float
    trajectories: int
    successes: int
    families: int
    distance: float  # mean over pairs of different attacks, 1 - cosine of sentence embeddings
    seconds: float  # of training


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--searchers", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a call")
    parser.add_argument("--concurrency", type=int, default=8, help="calls that the endpoint serves at once")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["ENDPOINT_TOKEN"] = secrets.token_hex(16)
    server = serve(arguments.seconds, arguments.concurrency, os.environ["ENDPOINT_TOKEN"])
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    rows = []
    encoder = SentenceEmbedder.load()
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for count in map(int, arguments.searchers.split(",")):
                run_flags = ["--seed", str(repeat), "--steps", str(arguments.steps), "--task.victim.url", url]
                rows.append(run(count, run_flags, arguments.world, Path(folder) / f"{count}-{repeat}", encoder))
                print(rows[-1], flush=True)
    report(rows)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def run(searchers: int, run_flags: list[str], world: Path, path: Path, encoder: SentenceEmbedder) -> Row:
    """One `tba train`, in a process of its own."""
    paths = ["--task.attacks", f"{world}/attacks.jsonl", "--task.classifier.path", f"{world}/classifier"]
    place = ["--runs", str(path.parent), "--run-name", path.name, "--searchers", str(searchers)]
    command = [sys.executable, "-m", "tba", "train", str(RECIPE), *place, *paths, *run_flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((path / "summary.json").read_text())
    with JournalFollower(path / "journal.sqlite") as journal:
        attacks = journal.drain()
    created = [t.created for t in attacks]
    seconds = summary["wall_seconds"]["train"]
    inside = [at for at in created if at >= max(created) - seconds]
    tried = encoder.embed(sorted({t.completion.text for t in attacks}))
    won = {t.completion.text for t in attacks if t.reward_parts.get("success")}
    world_of = TriggerWorld()
    return Row(
        searchers=searchers,
        per_minute=60 * len(inside) / seconds,
        trainer_cpu_ms=1000 * statistics.median(step["cpu_seconds"] for step in steps[1:]),
        trainer_idle=summary["trainer_idle"],
        trajectories=len(attacks),
        successes=len(won),
        families=len({world_of.family(text) for text in won} - {None}),
        distance=mean_distance(tried @ tried.T).estimate,
        seconds=seconds,
    )


def report(rows: list[Row]) -> None:
    """Each against the fewest searchers."""
    counts = sorted({row.searchers for row in rows})
    means = {n: [row for row in rows if row.searchers == n] for n in counts}
    base = means[counts[0]]
    for n in counts:
        rate = statistics.mean(r.per_minute for r in means[n]) / statistics.mean(r.per_minute for r in base)
        cpu = statistics.mean(r.trainer_cpu_ms for r in means[n]) / statistics.mean(r.trainer_cpu_ms for r in base)
        print(
            f"{n} searchers: {statistics.mean(r.per_minute for r in means[n]):7.1f} trajectories a minute "
            f"({rate:.2f}x), "
            f"trainer {statistics.mean(r.trainer_cpu_ms for r in means[n]):.1f} ms of CPU a step ({cpu:.3f}x)"
        )


if __name__ == "__main__":
    main()
