"""Attacks on rewards by running code: what each of the programs of `tba_lab.code_attacks` earns, takes and leaves.

    python lab/benchmarks/code_attacks.py --level landlock --out lab/results/code_attacks.csv

Each program is an answer to a problem in each form of tests. Beside each, an honest program runs, which must earn its
reward. A row says what the program earned and what its honest score is, the seconds it took, the processes and files
that were left, and whether the judge's files, its other processes and the honest program were untouched. `--level
fusion` sends the programs to a server that answers as SandboxFusion does; it takes those that concern the judge.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tba
from tba_lab.code_attacks import Attack, answered, attacks, fields_of, lures, program
from tba_lab.fusion_server import fusion_server

COLUMNS = ["level", "form", "kind", "attack", "earned", "honest_score", "seconds"]
COLUMNS += ["processes_left", "files_left", "untouched", "sibling"]
_LEFT = [Path("/dev/shm"), Path("/tmp"), Path("/var/tmp")]
# an honest answer that is judged beside each attack, long enough to be disturbed by it
_SLOW = "import time\ndef slow(x):\n    time.sleep(0.2)\n    return x"


def main() -> None:
    parser = argparse.ArgumentParser(description="attacks on rewards by running code")
    parser.add_argument("--level", choices=("namespaces", "landlock", "fusion"), default="landlock")
    parser.add_argument("--forms", nargs="+", default=["calls", "statements", "stdin"])
    parser.add_argument("--only", default="", help="the kind of attacks, or a part of a name")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a test may take")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [a for a in attacks() if options.only in a.kind or options.only in a.name]
    if options.level == "fusion":
        chosen = [a for a in chosen if a.kind in ("claim", "honest")]
        with fusion_server() as (url, _):
            rows = measure(chosen, [form for form in options.forms if form != "statements"], options, url)
    else:
        rows = measure(chosen, options.forms, options, "")
    wrong = [row for row in rows if row["earned"] != row["honest_score"] or row["processes_left"] or row["files_left"]]
    wrong += [row for row in rows if not (row["untouched"] and row["sibling"])]
    for row in wrong:
        print("HOLE", row)
    print(f"{len(rows)} runs of {len(chosen)} programs at {options.level}: {len(wrong)} holes")
    if options.out is not None:
        earlier_rows = list(csv.DictReader(options.out.open())) if options.out.exists() else []
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows([row for row in earlier_rows if row["level"] != options.level] + rows)
    sys.exit(bool(wrong))


def measure(chosen: list[Attack], forms: list[str], options: argparse.Namespace, url: str) -> list[dict[str, Any]]:
    rows = []
    level: Any = "landlock" if url else options.level
    # the least level is the one that is used, where a stronger one would be there too
    reward = tba.CodeReward(level=level, seconds=options.seconds, answer_seconds=9, processes=1, sandbox_fusion=url)
    sibling = tba.CodeReward(level=level, processes=1)
    if not url:
        at_level(reward, level)
        at_level(sibling, level)
    with TemporaryDirectory() as folder, lures(Path(folder)) as lure_places:
        for form in forms:
            for attack in chosen:
                rows.append({"level": options.level, **measure_attack(attack, form, lure_places, reward, sibling)})
                print(",".join(str(rows[-1][name]) for name in COLUMNS), flush=True)
    return rows


def at_level(reward: tba.CodeReward, level: Any) -> None:
    """Has a reward use a level where a stronger one is there too."""
    from tba.rewards.code_running import LocalRunner, ProgramLimits
    from tba.rewards.sandbox import Sandbox

    limits = ProgramLimits(reward.seconds, reward.answer_seconds, reward.memory_mb << 20)
    reward.__dict__["_runner"] = LocalRunner(Sandbox(level), limits)


def measure_attack(
    attack: Attack, form: str, lure_places: Mapping[str, Any], reward: tba.CodeReward, sibling: tba.CodeReward
) -> dict[str, Any]:
    siblings: list[float] = []
    path, victim = Path(lure_places["PATH"]), lure_places["VICTIM"]
    before = (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
    code = f"```\n# {attack.name} {form}\n{_SLOW}\n```"
    thread = threading.Thread(
        target=lambda: siblings.append(
            sibling.judge([answered({"test_list": ["assert slow(1) == 1"]}, code)])[0].reward
        )
    )
    thread.start()
    start = time.monotonic()
    earned = reward.judge([answered(fields_of(attack, form), program(attack, form, lure_places))])[0].reward
    seconds = time.monotonic() - start
    thread.join()
    files = [str(p) for folder in _LEFT for p in folder.glob("attack_*")]
    is_same = path.exists() and before == (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
    has_victim = Path(f"/proc/{victim}").exists() and os.getpriority(os.PRIO_PROCESS, victim) == os.getpriority(0, 0)
    return {
        "form": form,
        "kind": attack.kind,
        "attack": attack.name,
        "earned": earned,
        "honest_score": attack.score,
        "seconds": round(seconds, 2),
        "processes_left": programs_running(),
        "files_left": " ".join(files),
        "untouched": is_same and has_victim,
        "sibling": siblings == [1.0],
    }


def programs_running() -> int:
    """Returns how many programs run: processes below a worker of this process, or of one that has lost its parent."""
    parents = {}
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
            if b"sandbox_worker" in command or b"sleep\x00999" in command:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    count = 0
    for process in parents:
        depth, above = 0, process
        while above in parents:
            depth, above = depth + 1, parents[above]
        # a worker in namespaces has one child, the first process there, which starts the programs
        count += above in (1, os.getpid()) and depth > 1 + _has_namespaces(parents, process)
    return count


def _has_namespaces(parents: Mapping[int, int], process: int) -> bool:
    """Returns whether the worker of a process has namespaces of its own."""
    while parents.get(process) in parents:
        process = parents[process]
    return b'"namespaces"' in Path(f"/proc/{process}/cmdline").read_bytes()


if __name__ == "__main__":
    main()
