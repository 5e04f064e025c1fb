"""Record a short run, stopped before its last step, which later versions have to read and resume.

    python tools/record_compatibility.py tests/fixtures/compatibility/VERSION

The folder gets the recipe, its problems, its model in the Hugging Face layout, the run and what tests expect of it. A
fixture that is committed is never recorded again, also not when a test of it fails: it stands for the runs that users
have on disk. A release that changes what a run leaves behind adds one of its own, in a folder beside it.

The fixture names no machine, no user and no folder: the run is made in a temporary folder, from which commands use
relative paths. What still names one is left out or rewritten below.
"""

from __future__ import annotations

import getpass
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tba.replay.follower import JournalFollower
from tba.training.checkpoint import newest_checkpoint
from tba.training.tiny_models import ScratchModel, character_tokenizer

ROOT = Path(__file__).parents[1]
ALPHABET = "abcd"
STEPS, STOPPED_AFTER = 24, 4  # optimizer steps of the whole run, and after how many it may be stopped
EVALUATIONS = "evaluations.jsonl"
DEADLINE = 300.0  # seconds until the run has to have stopped
LARGEST = 500_000  # bytes of a fixture: every clone has it
LEFT_OUT = ("tensorboard", "lock", "lock-parts")  # events are named after the host, a lock has a process id
RECIPE = '''\
"""Words to be written backwards, by a policy of a few thousand weights: a run for later versions to resume."""

from pathlib import Path

import tba


def share_of_letters(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


recipe = tba.Recipe(
    name="backwards",
    description="words of three letters written backwards",
    task=tba.Jsonl(train=Path("problems.jsonl"), marked_by=tba.FunctionReward(share_of_letters, concurrency=4)),
    model=tba.HuggingFace(path="model", device="cpu", generation=tba.EngineSettings(slots=2, max_completion_tokens=4)),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=48)),
    steps=24,
    groups_per_step=2,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=2,
)
'''


def main() -> int:
    """Record a fixture into the folder that the command line names."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    target = Path(sys.argv[1])
    if target.exists():
        print(f"{target} is there: a fixture is never recorded again; name another folder")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "fixture"
        work.mkdir()
        write_inputs(work)
        record(work)
        scrub(work)
        write_expected(work)
        if problems := list(leaks(work, folder)):
            print("\n".join(problems))
            return 1
        shutil.copytree(work, target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{target}: {size:,} bytes")
    return int(size > LARGEST)


def write_inputs(work: Path) -> None:
    """Write the recipe, its problems and its model."""
    (work / "recipe.py").write_text(RECIPE)
    words = ["".join(letters) for letters in itertools.product(ALPHABET, repeat=3)]
    rows = [json.dumps({"prompt": f"{word}>", "answer": word[::-1]}) for word in words]
    (work / "problems.jsonl").write_text("\n".join(rows) + "\n")
    tokenizer = character_tokenizer(f"{ALPHABET}>")
    sizes = ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=16)
    sizes.start(tokenizer).save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")


def record(work: Path) -> None:
    """Train in processes, as users do, and stop by Ctrl-C once some steps are made."""
    arguments = ["train", "recipe.py", "--runs", ".", "--run-name", "run", "--run.checkpoint-every", "4"]
    process = subprocess.Popen([sys.executable, "-m", "tba", *arguments], cwd=work)  # noqa: S603 - our own command
    run, limit = work / "run", time.monotonic() + DEADLINE
    while process.poll() is None and not (lines(run / "metrics.jsonl") >= STOPPED_AFTER and lines(run / EVALUATIONS)):
        if time.monotonic() > limit:
            process.kill()
            raise TimeoutError(f"waited {DEADLINE:g} s for step {STOPPED_AFTER} of the run in {work}")
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code = process.wait(DEADLINE)
    if code != 128 + signal.SIGINT:
        raise RuntimeError(f"the run ended with {code} and not by Ctrl-C: record again with more steps")


def lines(path: Path) -> int:
    """Returns how many lines a file has; 0 without the file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def scrub(work: Path) -> None:
    """Leave out and rewrite what names the machine, and what no version reads again."""
    run = work / "run"
    for name in LEFT_OUT:
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    facts = json.loads((run / "recipe.json").read_text())
    facts["recipe"] = "recipe.py"
    (run / "recipe.json").write_text(json.dumps(facts, indent=2) + "\n")


def write_expected(work: Path) -> None:
    """Write what any later version has to count, beside the run."""
    run = work / "run"
    with JournalFollower(run / "journal.sqlite", create=False) as journal:
        trajectories = journal.drain()
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    expected = {
        "steps": STEPS,
        "checkpoint_step": checkpoint.version.step,
        "metrics_rows": lines(run / "metrics.jsonl"),
        "evaluations": lines(run / EVALUATIONS),
        "rows": len(trajectories),
        "tokens": sum(t.length for t in trajectories),
        "rewards": {t.uid: t.reward for t in trajectories},
    }
    (work / "expected.json").write_text(json.dumps(expected, indent=0) + "\n")


def leaks(work: Path, folder: str) -> Iterator[str]:
    """Yields a sentence for each file that names a folder of this machine, or as text the machine or its user."""
    folders = {folder, tempfile.gettempdir(), str(ROOT), sys.prefix, sys.base_prefix, str(Path.home()) + "/"}
    names = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in (socket.gethostname(), getpass.getuser())))
    for file in sorted(path for path in work.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for place in folders:
            if place.encode() in content:
                yield f"{file.relative_to(work)} has {place!r}"
        with suppress(UnicodeDecodeError):  # in weights two letters mean nothing
            if match := names.search(f"{file.name} {content.decode()}"):
                yield f"{file.relative_to(work)} has {match[0]!r}"


if __name__ == "__main__":
    sys.exit(main())
