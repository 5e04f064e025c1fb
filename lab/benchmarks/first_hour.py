"""A new user's first hour, typed: what docs/index.md and docs/your_task.md say, in a fresh clone, with each one's time.

    python lab/benchmarks/first_hour.py [--python PATH] [--torch cpu] [--steps N] [--folder DIR]

The quickstart, its summary and report; the task with letters of examples/my_task.py, checked, trained, its base as a
folder; a file of problems written here, checked and trained on by examples/my_file.py with that base as the model;
a report of the three runs; the notebook, cell by cell. `make quickstart` (TORCH as --torch says) installs into the
clone; with --python PATH that environment is used instead, and `tba train quickstart` typed. --steps shortens the
user's own two runs. Prints a line for each command; what it said is a file in --folder, which is kept, beside the
clone. Ends at the first command that fails, with exit code 1 and the end of what that command said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 3600.0  # seconds for one command: an installation over a slow line, too
LAST = 30  # lines shown of a command that failed


class Hour:
    """Types commands in a clone below `folder`, where each one's output is kept."""

    def __init__(self, folder: Path, python: Path | None) -> None:
        self.folder = folder
        self.clone = folder / "tba"
        # not resolved: a virtual environment's python is a link, and knows by its place which environment it is
        self.python = python.absolute() if python else self.clone / ".venv" / "bin" / "python"
        # a new user has no bases kept from earlier runs, and no window for a notebook's plots
        self.environment = {**os.environ, "TBA_CACHE": str(folder / "cache"), "MPLBACKEND": "agg"}
        if python:
            self.environment["PYTHONPATH"] = str(self.clone / "src")
        self.typed = 0

    def tba(self, command: str) -> None:
        self.type(f"tba {command}", [str(self.python), "-m", "tba", *shlex.split(command)])

    def type(self, text: str, command: list[str]) -> None:
        """Run `command`, which is told as `said`. Raises `SystemExit` when it fails."""
        self.typed += 1
        output = self.folder / f"{self.typed:02}.txt"
        began = time.perf_counter()
        with output.open("w") as file:
            code = subprocess.run(
                command,
                cwd=self.clone if self.clone.exists() else self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=DEADLINE,
            ).returncode
        print(f"{time.perf_counter() - began:8.1f} {code:5}  {text}", flush=True)
        if code:
            print(*output.read_text(errors="replace").splitlines()[-LAST:], sep="\n", file=sys.stderr)
            raise SystemExit(1)


def own_file(path: Path, problems: int = 300) -> None:
    """Words whose answer is to begin with the first of their letters in order, as the letters' base mostly does."""
    draw = random.Random(1)
    words = {"".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)): None for _ in range(problems)}
    path.write_text("".join(json.dumps({"prompt": f"{w}>", "letter": min(w)}) + "\n" for w in words))


def as_script(notebook: Path) -> str:
    """The code of a notebook, cell after cell."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")


def spend(hour: Hour, torch: str | None, own_python: bool, steps: int | None) -> None:
    hour.type("git clone", ["git", "clone", "-q", str(ROOT), str(hour.clone)])
    if own_python:
        hour.tba("train quickstart")
    else:
        command = ["make", "quickstart", f"PYTHON={sys.executable}", *([f"TORCH={torch}"] if torch else [])]
        hour.type("make quickstart", command)
    (first_run,) = (hour.clone / "runs").iterdir()
    hour.tba(f"show runs/{first_run.name}")
    hour.tba(f"report runs/{first_run.name}")

    few = f" --steps {steps}" if steps else ""
    hour.tba("check examples/my_task.py")
    hour.tba(f"train examples/my_task.py --run-name letters{few}")
    hour.tba("sft examples/my_task.py --out base")

    own_file(hour.clone / "words.jsonl")
    my_file = "examples/my_file.py --task.train words.jsonl --model.path base"
    hour.tba(f"check {my_file}")
    hour.tba(f"train {my_file} --run-name words{few}")
    hour.tba(f"report runs/{first_run.name} runs/letters runs/words --out three.html")

    (hour.clone / "first_run.py").write_text(as_script(hour.clone / "examples" / "first_run.ipynb"))
    hour.type("examples/first_run.ipynb", [str(hour.python), "first_run.py"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=None)
    parser.add_argument("--torch", default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SystemExit(f"{folder} is not empty: the first hour begins in an empty folder")
        print(" seconds  code  command")
        began = time.perf_counter()
        spend(Hour(folder, options.python), options.torch, options.python is not None, options.steps)
        print(f"{time.perf_counter() - began:8.1f}        all of it")


if __name__ == "__main__":
    main()
