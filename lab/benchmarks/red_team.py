"""Success and diversity of the runs of the study `red_team`: `tba red-team eval` of each, as a table.

    tba red-team world --out red_team_world
    tba-lab study red_team
    python lab/benchmarks/red_team.py --study studies/red_team [--seconds 60] [--out FILE] [--plot FILE.png]

`before` is the supervised attacker. Figures are means over seeds with their range; families are those of the world.
From a run's evaluations on the way (256 attacks) come its success after --seconds, and the seconds until it is above
60 %; both count from its start, with warm-up and evaluations. --out FILE.csv is the study's `runs.csv` with success,
families and distance of these attacks; any other name is given everything as JSON.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tba.evaluation.estimators import SAMPLED

TARGET = 0.6
EVALUATE = [sys.executable, "-m", "tba", "red-team", "eval", "red_team_small"]


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--world", type=Path, default=Path("red_team_world"))
    parser.add_argument("--attacks", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    runs = {"before-0": None} | {path.parent.name: path.parent for path in sorted(arguments.study.rglob("recipe.json"))}
    facts_by_run: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in runs.items():
            facts_by_run[name] = evaluated(run, arguments.world, arguments.attacks, Path(folder) / f"{name}.json")
            print(name, line(facts_by_run[name]), flush=True)
        if arguments.plot is not None:
            files = [str(Path(folder) / f"{name}.json") for name in runs]
            subprocess.run([*EVALUATE[:4], "plot", *files, "--out", str(arguments.plot)], check=True)
    table(facts_by_run)
    over_time({name: run for name, run in runs.items() if run is not None}, arguments.seconds)
    if arguments.out is not None and arguments.out.suffix == ".csv":
        arguments.out.write_text(with_diversity(arguments.study / "runs.csv", facts_by_run), encoding="utf-8")
    elif arguments.out is not None:
        arguments.out.write_text(json.dumps(facts_by_run, indent=1) + "\n")


def evaluated(run: Path | None, world: Path, attacks: int, out: Path) -> dict[str, Any]:
    """What `tba red-team eval` says of a run; None: of the supervised attacker."""
    paths = ["--task.attacks", f"{world}/attacks.jsonl", "--task.classifier.path", f"{world}/classifier"]
    paths += ["--task.victim.path", f"{world}/victim", "--families", f"{world}/families.json"]
    of = [] if run is None else ["--checkpoint", str(run)]
    subprocess.run([*EVALUATE, *of, *paths, "--attacks", str(attacks), "--out", str(out)], check=True, timeout=1800)
    facts: dict[str, Any] = json.loads(out.read_text())
    return {name: value for name, value in facts.items() if name not in ("scores", "families")}


def with_diversity(runs: Path, facts_by_run: dict[str, dict[str, Any]]) -> str:
    """The lines of a study's runs with three more columns."""
    with runs.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        facts = facts_by_run.get(f"{row['variant']}-{row['seed']}")
        if facts is not None:
            row |= {"success": facts["success"]["estimate"], "families": facts["found"]}
            row |= {"distance": facts["distance"]["estimate"]}
    text = io.StringIO()
    table = csv.DictWriter(text, [*rows[0], *(n for n in ("success", "families", "distance") if n not in rows[0])])
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def line(facts: dict[str, Any]) -> str:
    """One run."""
    success, distance = facts["success"]["estimate"], facts["distance"]["estimate"]
    return f"success {success:.1%}, distance {distance:.3f}, families {facts['found']}"


def table(facts_by_run: dict[str, dict[str, Any]]) -> None:
    """Variants over their seeds."""
    variants: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, facts in facts_by_run.items():
        variants[name.rpartition("-")[0]].append(facts)
    print("\n| variant | runs | successes, % | pairwise distance | families found |\n|---|---|---|---|---|")
    for variant, rows in variants.items():
        success = span([100 * row["success"]["estimate"] for row in rows], 1)
        distance = span([row["distance"]["estimate"] for row in rows], 3)
        print(f"| {variant} | {len(rows)} | {success} | {distance} | {span([row['found'] for row in rows], 1)} |")


def over_time(runs: dict[str, Path], seconds: float) -> None:
    """Success after so many seconds, and seconds to the target."""
    variants: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for name, run in runs.items():
        rows = [json.loads(row) for row in (run / "evaluations.jsonl").read_text().splitlines()]
        curve = [(row["wall_seconds"], row["value"]) for row in rows if row["metric"] == SAMPLED]
        variants[name.rpartition("-")[0]].append(curve)
    print(f"\n| variant | successes after {seconds:g} s, % | seconds to {TARGET:.0%} | last evaluation, s |")
    print("|---|---|---|---|")
    for variant, curves in variants.items():
        best_shares = span([100 * max((at, value) for at, value in curve if at <= seconds)[1] for curve in curves], 1)
        first_times = [next((f"{at:.0f}" for at, value in curve if value >= TARGET), "never") for curve in curves]
        print(
            f"| {variant} | {best_shares} | {', '.join(first_times)} | {span([curve[-1][0] for curve in curves], 0)} |"
        )


def span(values: list[float], digits: int) -> str:
    """Mean, and from least to most."""
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


if __name__ == "__main__":
    main()
