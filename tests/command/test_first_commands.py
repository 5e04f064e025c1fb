"""Mistakes of a first day: what was printed at first and what is printed now.

Invariant: each is one sentence on what was given, what is wanted and what to do, with exit code 2 and nothing left
behind; or it is no mistake any longer. `before` is what commit 84f6eca printed, cut ({}: the word that was given).
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.written_run import write as written_run

import tba
from tba.__main__ import main
from tba.api import _resolve
from tba.errors import UserError
from tba.recipes.quickstart import BASE

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mistake:
    """Words of a command line, what they printed before, what they print now (a pattern) and the exit code."""

    words: str
    before: str
    now: str
    code: int = 2


NO_COMMAND = "there is no command {}: use one of train, search, ..."
NO_RECIPE = "there is no recipe {}; give one of calculator, ..."
AS_NOW = "the same"
SUMS = "tba.Jsonl(train='sums.jsonl')"
MISTAKES = (
    Mistake("--version", NO_COMMAND, r"^tba \S+ \([0-9a-f]{12}\)$", 0),
    Mistake("show runs", "wanted a run's directory", r"ended +ended +40 .*pass@1/greedy 75.0 %", 0),
    Mistake("show", "`tba show RUN` needs a run's directory", r"ended +ended +40 ", 0),
    Mistake("show runs/removed", AS_NOW, "runs/removed: there is no such run; give the directory of one"),
    Mistake("resume runs/removed", NO_COMMAND, "runs/removed: there is no such run; give the directory of one"),
    Mistake(
        "eval runs/removed",
        NO_RECIPE,
        "there is no run at runs/removed .*: give a run's folder",
    ),
    Mistake("train runs/ended", NO_RECIPE, "runs/ended is a run: `tba resume runs/ended` continues it"),
    Mistake("train quikstart", AS_NOW, "there is no recipe 'quikstart'.*did you mean 'quickstart'"),
    Mistake("train sums.jsonl", NO_RECIPE, f"sums.jsonl is no recipe: .*{re.escape(SUMS)}"),
    Mistake("train quickstart --step 5", AS_NOW, "no field --step; did you mean --steps"),
    Mistake("train quickstart --optimizer.lr fast", AS_NOW, "--optimizer.lr takes a number, not 'fast'"),
    Mistake("train quickstart --objective grpo", AS_NOW, "Another objective is chosen in code"),
    Mistake("train quickstart --model.path ./none", AS_NOW, "there is no folder ./none: give the folder of a model"),
    Mistake(
        "train quickstart --model.generation.engine vllm",
        "a run's folder, a supervised warm start, two processes; then the sentence, and the folder stays",
        "vllm, which is not installed: pip install",
    ),
    Mistake("train quickstart --model.device cuda", AS_NOW, "this machine has none .*set --model.device cpu"),
    Mistake("train quickstart --runtime inline --searchers 2", AS_NOW, "--searchers is 2, but the inline runtime"),
    Mistake("train wrong_column.py", AS_NOW, "neither a field 'text' nor 'messages': it has answer, question"),
    Mistake("train wrong_signature.py", AS_NOW, r"'right' takes \(guess, truth\), of which none is named"),
    Mistake("train nameless.py", "26 lines, AttributeError", "task, Mine, has no name: give the class the line `name"),
    Mistake("train plain.py --steps 0", AS_NOW, "--steps is 0, it must be at least 1"),
)


@dataclass(frozen=True)
class Written:
    """What a first script writes, what it raised before, and what is made of it now: an object, or a sentence."""

    code: Callable[[], Any]
    before: str
    now: Any


def recipe(**parts: Any) -> tba.Recipe:
    return tba.Recipe(**{"task": tba.Arithmetic(), "model": BASE, "objective": tba.Grpo(), **parts})


def jsonl(train: Any) -> str:
    return tba.Jsonl(train=train).name


WRITTEN = (
    Written(lambda: jsonl("sums.jsonl"), "AttributeError: 'str' object has no attribute 'stem'", "sums"),
    Written(
        lambda: tba.HuggingFace(path=BASE).path,
        "AttributeError: 'PosixPath' object has no attribute 'startswith'",
        str(BASE),
    ),
    Written(
        lambda: tba.TrajectoryBalance(beta=0.05).beta,
        "TypeError: 'float' object is not callable",
        tba.Constant(0.05),
    ),
    Written(
        lambda: recipe(model=str(BASE)).model,
        "AttributeError: 'str' object has no attribute 'heads'",
        tba.HuggingFace(path=str(BASE)),
    ),
    Written(
        lambda: recipe(objective="grpo"),
        "AttributeError: 'str' object has no attribute 'needs'",
        "the recipe's objective is 'grpo': give an object, such as .* or tba.Grpo",
    ),
    Written(
        lambda: tba.OptimizerSettings(lr="1e-5").lr,
        "TypeError: must be real number, not str",
        1e-5,
    ),
    Written(
        lambda: tba.OptimizerSettings(lr="fast"),
        "TypeError: must be real number, not str",
        "OptimizerSettings's lr is 'fast': give a number",
    ),
    Written(
        lambda: _resolve("quickstart", {"optimizer": {"lr": 1e-5}})[0].optimizer.lr,
        "AttributeError: 'dict' object has no attribute 'schedule'",
        1e-5,
    ),
)
RECIPE = """
import tba
from tba.rewards.exact_answer import ExactAnswer

def right(guess, truth):
    return 1.0

class Mine:
    def problems(self, split):
        return [tba.Problem(f"{n}+1=", {"answer": str(n + 1)}) for n in range(10)]

    def reward(self):
        return ExactAnswer()

recipe = tba.Recipe(task=TASK, model=BASE, objective=tba.TrajectoryBalance(beta=0.05), steps=1)
"""
TASKS = {
    "wrong_column": 'tba.Jsonl(train="sums.jsonl", prompt_field="text")',
    "wrong_signature": 'tba.Jsonl(train="sums.jsonl", prompt_field="question", marked_by=right)',
    "nameless": "Mine()",
    "plain": 'tba.Jsonl(train="sums.jsonl", prompt_field="question")',
}


@pytest.fixture(scope="module")
def first_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a file of problems and some recipes."""
    folder = tmp_path_factory.mktemp("first")
    written_run(folder / "runs" / "ended")
    (folder / "sums.jsonl").write_text("".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(30)))
    for name, task in TASKS.items():
        (folder / f"{name}.py").write_text(RECIPE.replace("TASK", task).replace("BASE", repr(str(BASE))))
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words)
def test_a_mistake_of_a_first_day_is_answered_in_a_sentence_that_says_what_to_do(
    mistake: Mistake, first_day: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(first_day)
    monkeypatch.setattr("sys.path", [*sys.path])
    before = there(first_day)
    assert main(mistake.words.split()) == mistake.code
    said = capsys.readouterr()
    assert re.search(mistake.now, " ".join((said.err if mistake.code else said.out).split())), said
    if mistake.code:
        assert said.err.startswith("tba: ")
        assert said.err.count("\n") == 1
    assert there(first_day) == before


def there(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written.before)
def test_what_a_first_script_writes_is_what_it_means_or_a_sentence(written: Written) -> None:
    try:
        found = written.code()
    except UserError as error:
        found = str(error)
    assert found == written.now or re.search(str(written.now), str(found))


def test_a_stand_in_for_a_judge_at_a_busy_port_says_so_and_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        example = [sys.executable, str(ROOT / "examples" / "judge_server.py"), port]
        ended = subprocess.run(example, capture_output=True, text=True, timeout=60, check=False)
    assert (
        ended.stderr == f"port {port} cannot be used (Address already in use): give another, such as {int(port) + 1}\n"
    )
    assert ended.returncode == 1
