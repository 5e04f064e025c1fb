"""Kills at random moments, of searcher, trainer and driver, on a shortened quickstart: what was lost, where it led.

    python benchmarks/faults.py [--kills 10] [--seeds 3] [--steps 200] [--parts searcher,trainer,driver] [--out FILE]
                                [--by both|seconds|steps]

Undisturbed runs come first, one for each seed. Then each part is killed (SIGKILL) so many times, each in a run of its
own, in turn at a moment drawn uniformly between the run's first second and the time that an undisturbed one takes, and
(since half of a short run is its start) at a step drawn uniformly from all. A searcher
or a trainer has to be started again by the run itself; a run whose driver was killed is taken up by `tba train
--resume` (one that had no checkpoint yet is begun again, and counted). Of every run it is required that

  - each trajectory acknowledged before the kill is in the journal at the end, once (`lost`);
  - the account of tokens and trajectories closes, the record of uses agrees with it, and so do the steps that led to
    the last weights (`twice` counts uses beyond those);
  - it makes all its steps, and the sampled accuracy lies within the spread of the undisturbed runs, widened by the
    standard error of one evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tba.command.replay import uses_of
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.runtime.directory import RunDirectory

SAMPLED = "pass@1/sampled"
PROBLEMS = 1000
SHORT = [
    *("--evaluation.every", "0", "--evaluation.problems", str(PROBLEMS), "--evaluation.pass-k", "0"),
    *("--evaluation.no-greedy", "--run.checkpoint-every", "25", "--record.no-tensorboard", "--record.samples", "0"),
]
DEADLINE = 600.0  # seconds for any run


@dataclass(frozen=True)
class Outcome:
    """One run that was disturbed, or not."""

    part: str  # what was killed; "none"
    seed: int
    moment: float  # seconds after the start
    step: int  # recorded by then
    code: int
    again: bool  # begun again, for want of a checkpoint
    acknowledged: int  # trajectories at the kill
    lost: int
    twice: int
    closes: bool
    accuracy: float
    seconds: float
    faults: dict[str, Any]


def main() -> int:
    """The exit code: 1 when a requirement was not met."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parts", default="searcher,trainer,driver")
    parser.add_argument("--first", type=int, default=0, help="number of the first kill, to go on with a series")
    parser.add_argument(
        "--by", choices=["both", "seconds", "steps"], default="both", help="what moments are drawn from"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            found.append(disturbed("none", seed, 0.0, arguments.steps, Path(folder) / f"none-{seed}"))
            say(found[-1])
        usual = [o.seconds for o in found]
        for i in range(arguments.first, arguments.first + arguments.kills):
            for part in arguments.parts.split(","):
                by_step = arguments.by == "steps" or (arguments.by == "both" and i % 2)
                draw = random.Random(f"{part} {i}").uniform(0.0, 1.0)
                moment = 1.0 if by_step else 1.0 + draw * (sum(usual) / len(usual) - 1.0)
                step = int(draw * arguments.steps) if by_step else 0
                path = Path(folder) / f"{part}-{i}"
                found.append(disturbed(part, i % arguments.seeds, moment, arguments.steps, path, step))
                say(found[-1])
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(o) for o in found], indent=1))
    return verdict(found)


def disturbed(part: str, seed: int, moment: float, steps: int, path: Path, step: int = 0) -> Outcome:
    """One run, in which `part` is killed after so many seconds and steps, to its end."""
    began = time.monotonic()
    begin = ["train", "quickstart", "--runs", str(path.parent), "--run-name", path.name, "--seed", str(seed)]
    whole = [*begin, "--steps", str(steps), *SHORT]
    driver = started(whole)
    at, acknowledged = 0, []
    if part != "none":
        victim = None
        while victim is None and driver.poll() is None:
            time.sleep(max(0.02, began + moment - time.monotonic()))
            if step and len(read_metrics(path)) < step:
                continue
            victim = (
                driver.pid if part == "driver" else parts_of(driver.pid).get({"searcher": "searcher-0"}.get(part, part))
            )
        moment, at, acknowledged = time.monotonic() - began, len(read_metrics(path)), uids_of(path)
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
    code = driver.wait(DEADLINE)
    again = False
    if code == -signal.SIGKILL:
        code = started(["train", "--resume", str(path)]).wait(DEADLINE)
        if code == 2 and not list((path / "checkpoints").glob("step-*")):
            again, acknowledged = True, []
            path = path.with_name(f"{path.name}-again")
            code = started([*whole[:5], path.name, *whole[6:]]).wait(DEADLINE)
    return outcome(part, seed, moment, at, code, again, acknowledged, path, time.monotonic() - began)


def outcome(
    part: str, seed: int, moment: float, at: int, code: int, again: bool, acknowledged: list[str], path: Path, s: float
) -> Outcome:
    """What the run left."""
    summary, uids = Summary.read(path), uids_of(path)
    if summary is None:
        tail = "\n".join(f.read_text()[-800:] for f in (path / "logs").glob("*.log"))
        raise SystemExit(f"{path.name}: no summary, exit code {code}\n{tail}")
    branch = {int(row["step"]): row["trajectories"] for row in read_metrics(path)}
    trained = summary.trajectories.trained_total
    return Outcome(
        part=part,
        seed=seed,
        moment=round(moment, 2),
        step=at,
        code=code,
        again=again,
        acknowledged=len(acknowledged),
        lost=len(set(acknowledged) - set(uids)) + len(uids) - len(set(uids)),
        twice=abs(int(uses_of(RunDirectory.open(path)).sum()) - trained) + int(abs(sum(branch.values()) - trained)),
        closes=summary.tokens.closes() and summary.trajectories.closes(),
        accuracy=[e.value for e in summary.evaluations if e.metric == SAMPLED and e.version.step == summary.steps][-1],
        seconds=round(s, 1),
        faults={name: n for name, n in summary.faults.items() if n},
    )


def verdict(found: list[Outcome]) -> int:
    """The table, and whether all is as required."""
    usual = [o.accuracy for o in found if o.part == "none"]
    error = max((a * (1 - a) / PROBLEMS) ** 0.5 for a in usual)
    low, high = min(usual) - 2 * error, max(usual) + 2 * error
    print(f"\nundisturbed: {', '.join(f'{a:.1%}' for a in usual)}; with two standard errors {low:.1%} to {high:.1%}")
    print("| killed | runs | finished | begun again | acknowledged | lost | twice | account closes | accuracy |")
    print("|---|---|---|---|---|---|---|---|---|")
    for part in dict.fromkeys(o.part for o in found):
        of = [o for o in found if o.part == part]
        print(
            f"| {part} | {len(of)} | {sum(o.code == 0 for o in of)} | {sum(o.again for o in of)} "
            f"| {sum(o.acknowledged for o in of):,} | {sum(o.lost for o in of)} | {sum(o.twice for o in of)} "
            f"| {sum(o.closes for o in of)} | {min(o.accuracy for o in of):.1%} to {max(o.accuracy for o in of):.1%}, "
            f"mean {sum(o.accuracy for o in of) / len(of):.1%} |"
        )
    bad = [o for o in found if o.code or o.lost or o.twice or not o.closes or not low <= o.accuracy <= high]
    for o in bad:
        print(f"NOT AS REQUIRED: {o}")
    return 1 if bad else 0


def started(arguments: list[str]) -> subprocess.Popen[bytes]:
    """A `tba` command in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "tba", *arguments], stdout=subprocess.DEVNULL)


def parts_of(pid: int) -> dict[str, int]:
    """Live parts of the driver `pid`, by name: what its forge has made."""
    return {
        name.removeprefix("tba-"): process
        for forge, called in _forked(pid).items()
        if called == "tba-forge"
        for process, name in _forked(forge).items()
    }


def _forked(pid: int) -> dict[int, str]:
    """The children of a process, and what they call themselves."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            if int(rest.split()[1]) == pid:
                found[int(entry.name)] = name
        except (OSError, ValueError, IndexError):
            continue
    return found


def uids_of(path: Path) -> list[str]:
    """Of all trajectories that the journal has acknowledged."""
    file = path / "journal.sqlite"
    if not file.exists():
        return []
    connection = sqlite3.connect(file, timeout=30.0)
    try:
        return [uid for (uid,) in connection.execute("SELECT uid FROM trajectories ORDER BY seq")]
    except sqlite3.OperationalError:  # no tables yet
        return []
    finally:
        connection.close()


def say(o: Outcome) -> None:
    """One line for a run."""
    print(
        f"{o.part:8} seed {o.seed} at {o.moment:5.1f} s (step {o.step:3}): exit {o.code}, "
        f"{o.acknowledged} acknowledged, "
        f"{o.lost} lost, {o.twice} twice, {'closes' if o.closes else 'DOES NOT CLOSE'}, {o.accuracy:.1%}, "
        f"{o.seconds:.0f} s, {o.faults}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
