"""How far one has to walk through the source: the files that run on three ways, and how long they are.

    python tools/walks.py [RECIPE] [--field value ...]

One run of a recipe (by default the quickstart, for a few steps) in the runtime `processes`, in which every function
that is called is written down: from the command line to a searcher's first round (the functions that have called one
another on the way there); in one round, to the journal; and in one step of the trainer, from the journal to an update
and the weights that are sent out. What is called while a module is imported does not count, nor does the code of
others. PYTHONPATH chooses the code.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import tba
from tba.__main__ import main as command

ROOT = Path(tba.__file__).parent
WATCHING = {("runtime/supervisor.py", "_train"), ("runtime/driving.py", "_train")}  # the driver has started all parts
ROUND = {("rollout/searcher.py", "round")}
STEP = {("runtime/trainer_loop.py", "step"), ("runtime/training.py", "step")}
STEPS = 4  # the step that is looked at is the last of them
WAYS = ("command line to a searcher's loop", "one round into the journal", "one step of the trainer")


class Walk:
    """What was called since the last mark. Processes are forked, so each has its own and leaves it in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.called: set[tuple[str, str]] = set()
        self.rounds = self.steps = 0
        self.started = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        where = own(frame)
        if where is None:
            return None
        if where in WATCHING and not self.started:
            self.started = True
            self.leave(WAYS[0], on_the_way(frame))
        elif where in ROUND and self.rounds < 2:
            if self.rounds == 0:
                self.leave(WAYS[0], on_the_way(frame))
            self.rounds += 1
            self.called = {where}
            return self.until_return(WAYS[1] if self.rounds == 2 else None)
        elif where in STEP and self.steps < STEPS:
            self.steps += 1
            self.called = {where}
            return self.until_return(WAYS[2] if self.steps == STEPS else None)
        self.called.add(where)
        return None

    def until_return(self, way: str | None) -> Any:
        """A trace of one call, at whose end what was called is left."""

        def trace(_: FrameType, event: str, __: Any) -> Any:
            if event == "return" and way is not None:
                self.leave(way, self.called)
            return trace

        return trace

    def leave(self, way: str, called: set[tuple[str, str]]) -> None:
        """In a file of this process."""
        path = self.folder / f"{way}-{os.getpid()}.json"
        path.write_text(json.dumps(sorted(called)))


def own(frame: FrameType) -> tuple[str, str] | None:
    """File and function of our own code; None for that of others, and for what a module does when it is imported."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if not file.startswith(str(ROOT)) or name == "<module>":
        return None
    return file.removeprefix(f"{ROOT}{os.sep}"), name


def on_the_way(frame: FrameType | None) -> set[tuple[str, str]]:
    """The functions that have called one another up to here, over all processes: a part is forked from its driver."""
    found = set()
    while frame is not None:
        found.add(own(frame))
        frame = frame.f_back
    return {where for where in found if where is not None}


def main() -> None:
    """The command line above."""
    arguments = sys.argv[1:]
    named = arguments and not arguments[0].startswith("-")
    recipe, fields = (arguments[0], arguments[1:]) if named else ("quickstart", arguments)
    short = [
        "--steps",
        str(STEPS),
        "--sync-every",
        "2",
        "--evaluation.problems",
        "20",
        "--replay.pacing.warm-up",
        "300",
        "--run.synchronous-rounds",  # which do not flow into one another
    ]
    with tempfile.TemporaryDirectory() as folder:
        walk = Walk(Path(folder))
        threading.settrace(walk)
        sys.settrace(walk)
        try:
            code = command(["train", recipe, "--runs", folder, "--run-name", "run", *short, *fields])
        finally:
            sys.settrace(None)
            threading.settrace(None)
        if code:
            raise SystemExit(code)
        print(f"| way | files | their lines | functions called |\n{'|---' * 4}|")
        for way in WAYS:
            called = {(f, n) for p in Path(folder).glob(f"{way}-*.json") for f, n in json.loads(p.read_text())}
            files = sorted({file for file, _ in called})
            lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
            print(f"| {way} | {len(files)} | {lines:,} | {len(called)} |")


if __name__ == "__main__":
    main()
