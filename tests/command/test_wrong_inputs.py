"""Whatever a command is given that it cannot use, it says so in one sentence, ends with 2 and leaves nothing behind.

Invariant: more than 600 wrong inputs, made of commands, fields, values, files and users' own code, go through `main`.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.runs import TOY, inline

from tba.__main__ import main
from tba.fields import Field, fields_of
from tba.settings import find

SUMS = str(Path(__file__).parents[1] / "tiny_sums.py")
DEEP = "[" * 100_000
HUGE = "9" * 40
BINARY = bytes(range(256)) * 4


@dataclass(frozen=True)
class Wrong:
    """Words of a command line, and what of them the sentence has to name."""

    words: tuple[str, ...]
    named: str

    def __str__(self) -> str:
        return " ".join(self.words)[:90]


def wrong(*words: str, named: str | None = None) -> Wrong:
    return Wrong(words, words[-1] if named is None else named)


# --- names, options and fields


def commands() -> Iterator[Wrong]:
    for name in ("trian", "Train", "--versions", "x" * 300, "\x1b[2Jtrain", "", " "):
        yield wrong(name, named=name[:4].strip("\x1b\n"))
    for command in ("train", "check", "sft", "sample", "eval", "show", "report", "push", "replay", "import"):
        yield wrong(command, named=f"tba {command}")
    for command in ("search", "model", "reward-model", "red-team", "completion"):
        yield wrong(command, named=command)
    for command in ("train", "check", "sft", "sample", "eval"):
        out = ("--out", "out") if command in ("sft", "sample") else ()
        for recipe in (
            "quikstart",
            "none.py",
            "folder",
            "folder.py",
            "../quickstart",
            "::",
            "staleness::none",
        ):
            yield wrong(command, recipe, *out, named=recipe.rpartition("/")[2].partition("::")[0])
    yield wrong("completion", "tcsh")
    yield wrong("completion", "bash", "zsh")
    yield wrong("model", "gpt5", "--out", "out", named="gpt5")
    yield wrong("model", "smollm2", "--out", "folder", named="folder")
    yield wrong("red-team", "plan")
    yield wrong("example", "my_tusk")


def values(field: Field) -> Iterator[str]:
    """What a field of this type does not take."""
    kinds = {field.hint, *typing.get_args(field.hint)}
    if typing.get_origin(field.hint) is typing.Literal:
        yield from ("nonsense", "")
    elif str not in kinds and Path not in kinds and float in kinds:
        yield from ("much", "nan", "1,5")
    elif str not in kinds and Path not in kinds and int in kinds:
        yield from ("many", "1.5", HUGE)


def fields() -> Iterator[Wrong]:
    """Of one recipe every third field, for each command that takes fields; of another the rest."""
    for at, field in enumerate(fields_of(find("quickstart"))):
        command = (("train",), ("check",), ("sft", "--out", "out"), ("eval",), ("sample", "--out", "out"))[at % 5]
        for value in list(values(field))[at % 2 :: 2]:
            yield wrong(command[0], "quickstart", *command[1:], field.flag, value, named=field.flag)
    for flag, value in (
        ("--steps", "0"),
        ("--steps", "-5"),
        ("--group-size", "1"),
        ("--searchers", "-1"),
        ("--seed", "-1"),
        ("--task.seed", "-1"),
        ("--policy-temperature", "inf"),
        ("--exploration.temperature", "inf"),
        ("--exploration.top-p", "1.5"),
        ("--optimizer.lr", "-1e-3"),
        ("--optimizer.weight-decay", "inf"),
        ("--evaluation.temperature", "-inf"),
        ("--evaluation.threshold", "inf"),
        ("--replay.selection.m", "2"),
        ("--model.warm-start.sft.seed", "-1"),
        ("--model.warm-start.sft.lr", "-1"),
        ("--model.warm-start.sft.clip-norm", "-1"),
        ("--model.warm-start.scratch.hidden-size", "0"),
        ("--model.warm-start.scratch.heads", "0"),
        ("--model.generation.max-completion-tokens", "0"),
        ("--model.generation.slots", "-3"),
        ("--prompts.limit", "0"),
        ("--record.samples-per-batch", "-1"),
        ("--run.threads", "0"),
        ("--cluster.searcher-gpus", "inf"),
        ("--replay.near.distance", "3"),
        ("--no-such-field", "1"),
        ("--optimizr.lr", "1"),
        ("--objective", "grpo"),
        ("--steps", "--seed"),
        ("--record.tensorboard", "true"),
    ):
        yield wrong("train", "quickstart", flag, value, named=flag.rpartition(".")[2].strip("-").partition("-")[0][:8])
    yield wrong("train", "quickstart", "steps=5", named="steps")
    yield wrong("train", "quickstart", "--steps")
    yield wrong("train", TOY_FILE, "--offline")


def options() -> Iterator[Wrong]:
    for words in (
        "eval toy.py --split test",
        "eval toy.py --distance -1",
        "eval toy.py --distance many",
        "eval toy.py --checkpoint none/there/at-all",
        "eval toy.py --checkpoint ./none",
        "sample toy.py",
        "sample toy.py --out out --samples 0",
        "sample toy.py --out out --samples -4",
        "sample toy.py --out out --prompts -1",
        "sample toy.py --out out --split test",
        "sample toy.py --out text.txt",
        "sample toy.py --out text.txt/out.jsonl",
        "eval toy.py --out text.txt/out.json",
        "eval toy.py --texts text.txt/out.jsonl",
        "sft toy.py --out text.txt",
        "sft toy.py",
        "train toy.py --runs text.txt",
        "train toy.py --run-name a/b",
        "train toy.py --run-name ..",
        "train toy.py --run-name -x",
        "train toy.py --data none.jsonl",
        "resume",
        "resume none",
        "resume run extra",
        "search --run none",
        "search",
        "search --run run",
        "search extra --run run",
        "report run --out text.txt/report.html",
        "report run --out folder",
        "report --out report.html",
        "report run --more",
        "show run --all",
        "push run",
        "push run name --out out",
        "push run a/b/c --out out",
        "push run owner/name --out text.txt",
        "push run ow\x1bner/name --out out",
        "replay run --sql",
        "replay run --export out.csv",
        "replay run --export none/there/out.jsonl",
        "replay run --seconds nan",
        "replay run --rows",
        "import run",
        "import run none.jsonl",
        "import run answers.jsonl --rewards mine",
        "import run answers.jsonl --max-tokens 0",
        "import run answers.jsonl --steps 5",
        "import new answers.jsonl",
        "import text.txt answers.jsonl",
        "import new answers.jsonl --recipe quikstart",
        "reward-model pairs.jsonl --out out",
        "reward-model none.jsonl --model folder --out out",
        "reward-model answers.jsonl --model folder --out out --folds 1",
        "reward-model answers.jsonl --model folder --out out --held-out 1",
        "red-team classifier none.jsonl --out out",
        "red-team classifier answers.jsonl --out out --held-out 2",
        "red-team world --out folder",
        "red-team world --out out --attacks 5",
        "red-team world --out out --families -1",
        "red-team eval toy.py --attacks 2",
    ):
        given = words.split(" ")
        yield wrong(*given, named="")
    for sql in (
        "DROP TABLE trajectories",
        "SELECT",
        "SELECT 1; SELECT 2",
        "DELETE FROM trajectories",
        "PRAGMA x",
        "",
        "ATTACH 'x' AS y",
        "SELECT nothing FROM trajectories",
    ):
        yield wrong("replay", "run", "--sql", sql, named="")


# --- files

JSONL = {  # what a file of lines may hold instead
    "empty": b"",
    "blank": b"\n\n \n",
    "binary": BINARY,
    "truncated": b'{"prompt": "1+1=", "response": "2", "score": 1, "text": "a", "label": 1}\n{"prompt": "1+',
    "deep": b'{"prompt": ' + DEEP.encode() + b"\n",
    "list": b'["1+1=", "2"]\n',
    "number": b"5\n",
    "null": b"null\n",
    "types": b'{"prompt": 5, "response": ["2"], "answer": {"a": 1}, "score": "high", "text": 7, "label": "x"}\n',
    "others": b'{"question": "1+1=", "reply": "2"}\n',
    "nothing": b'{"prompt": null, "response": null, "answer": null}\n',
    "roles": b'{"messages": [{"role": "user"}], "response": "2"}\n',
    "utf16": '{"prompt": "1+1=", "response": "2", "score": 1}\n'.encode("utf-16-le"),
    "latin": '{"prompt": "é", "response": "2", "score": 1}\n'.encode("latin-1"),
}
TOML = {
    "empty": b"steps =",
    "binary": BINARY,
    "truncated": b"[optimizer\nlr = 1",
    "deep": b"a = " + b"[" * 5000,
    "unknown": b"stepps = 5\n",
    "dates": b"steps = 2020-01-01\n",
    "nested": b"steps = [[1, 2]]\n",
    "objects": b"steps = [{a = 1}]\n",
    "text": b'steps = "many"\n',
    "table": b"[steps]\nx = 1\n",
    "number": b"optimizer = 5\n",
    "nan": b"[optimizer]\nlr = nan\n",
    "huge": b"steps = " + HUGE.encode(),
    "twice": b"steps = 1\nsteps = 2\n",
    "utf16": "steps = 1\n".encode("utf-16"),
}
JSON = {
    "empty": b"",
    "binary": BINARY,
    "truncated": b'{"recipe": "toy", "overr',
    "deep": DEEP.encode(),
    "list": b"[]",
    "null": b"null",
    "number": b"1e999",
    "hollow": b"{}",
    "types": b'{"recipe": 5, "overrides": "x", "resolved": [], "seed": {}, "began": null}',
}


def files() -> Iterator[Wrong]:
    for kind in JSONL:
        name = f"{kind}.jsonl"
        yield wrong("import", "run", name, "--trust", named=name)
        yield wrong("sft", name, "--out", "out", named=name)
        yield wrong("train", "jsonl.py", "--task.train", name)
        yield wrong("train", "toy.py", "--data", name)
        yield wrong("reward-model", name, "--model", "folder", "--out", "out", named=name)
        yield wrong("red-team", "classifier", name, "--out", "out", named="")
    for name in ("folder.jsonl", "none.jsonl"):
        yield wrong("import", "run", name, "--trust", named=name)
        yield wrong("sft", name, "--out", "out", named=name)
        yield wrong("train", "jsonl.py", "--task.train", name)
        yield wrong("reward-model", name, "--model", "folder", "--out", "out", named=name)
        yield wrong("red-team", "classifier", name, "--out", "out", named=name)
    for kind in TOML:
        yield wrong("train", "quickstart", "--config", f"{kind}.toml", named="")
    yield wrong("check", "quickstart", "--config", "none.toml")
    yield wrong("eval", "quickstart", "--config", "folder")
    yield wrong("train", "quickstart", "--config")
    for kind in JSON:
        run = f"run-{kind}"
        yield wrong("report", run)
        yield wrong("push", run, "owner/name", "--out", "out", named=run)
        yield wrong("resume", run)
        yield wrong("import", run, "answers.jsonl", named=run)
        yield wrong("search", "--run", run)
        yield wrong("eval", "tiny_sums.py", "--checkpoint", run)
    for command in ("show", "report", "replay"):
        for name in ("none", "folder", "text.txt"):
            yield wrong(command, name)
    yield wrong("show", "run", "none")
    yield wrong("report", "run", "folder")
    yield wrong("report", "run", "--out", "folder.html")


def models() -> Iterator[Wrong]:
    for kind in ("folder", "model-truncated", "model-binary", "model-config", "model-shapes", "model-none", "text.txt"):
        yield wrong("eval", SUMS, "--checkpoint", f"./{kind}", named=kind)
        yield wrong("train", SUMS, "--model.path", f"./{kind}", named=kind)
    for kind in ("empty", "binary", "truncated"):
        yield wrong("train", SUMS, "--model.path", f"{kind}.gguf")


# --- a user's own code

TASKS = {  # what stands in a task, by what is wrong with it
    "generator": "def problems(self, split):\n        return (5 for _ in range(3))",
    "text": "def problems(self, split):\n        return 'abc'",
    "dict": "def problems(self, split):\n        return {'a': tba.Problem('a')}",
    "none": "def problems(self, split):\n        return None",
    "number": "def problems(self, split):\n        return 7",
    "raises": "def problems(self, split):\n        return {}['nothing']",
    "divides": "def problems(self, split):\n        return [1 / 0]",
    "exits": "def problems(self, split):\n        raise SystemExit(0)",
    "late": "def problems(self, split):\n        yield tba.Problem('1')\n        raise OSError('lost')",
    "empty": "def problems(self, split):\n        return []",
    "no_eval": "def problems(self, split):\n        return [tba.Problem('1', {}, '2')] if split == 'train' else []",
    "pairs": "def problems(self, split):\n        return [('1', '2')]",
    "prompt": "def problems(self, split):\n        return [tba.Problem(5, {}, '2')]",
    "chat": "def problems(self, split):\n        return [tba.Problem([{'says': 'x'}], {}, '2')]",
    "empty_chat": "def problems(self, split):\n        return [tba.Problem((), {}, '2')]",
    "fields": "def problems(self, split):\n        return [tba.Problem('1', 'answer', '2')]",
    "taught": "def problems(self, split):\n        return [tba.Problem('1', {}, 2)]",
    "no_split": "def problems(self):\n        return [tba.Problem('1', {}, '2')]",
}
REWARDS = {
    "function": "return right",
    "nothing": "return None",
    "class": "return tba.WeightedFunctions",
    "raises": "raise KeyError('x')",
    "no_functions": "return tba.WeightedFunctions(())",
    "nan_weight": "return tba.WeightedFunctions(((right, float('nan')),))",
    "no_weight": "return tba.WeightedFunctions((right,))",
    "called": "return tba.WeightedFunctions(((1.0, 1.0),))",
}
FUNCTIONS = {
    "raises": "return 1 / 0",
    "nan": "return float('nan')",
    "infinite": "return float('inf')",
    "text": "return 'good'",
    "none": "return None",
    "list": "return [1.0]",
    "unknown": "return answer",
}
SOURCES = {  # whole files
    "empty": "",
    "syntax": "recipe = Recipe(",
    "imports": "import nothing_of_this_name",
    "exits": "raise SystemExit(3)",
    "raises": "1 / 0",
    "kind": "recipe = 5",
    "class": "import tba\nrecipe = tba.Recipe",
    "function": "def recipe():\n    return 5",
    "lacks": "import tba\nrecipe = tba.Recipe()",
    "field": "import tba\nrecipe = tba.Recipe(nonsense=5)",
    "binary": "\0\0\0",
    "interrupted": "raise ValueError('two\\nlines')",
}
FILE = """
from dataclasses import dataclass, replace
import tba
from tiny_sums import recipe as tiny
def right(prompt, completion{wanted}):
    {function}
@dataclass(frozen=True)
class Own:
    name: str = "own"
    {problems}
    def reward(self):
        {reward}
recipe = replace(tiny, task=Own(), name="own")
"""
GOOD = {
    "wanted": "",
    "function": "return 1.0",
    "problems": "def problems(self, split):\n        return [tba.Problem('1+1=', {}, '2')]",
    "reward": "return tba.WeightedFunctions(((right, 1.0),))",
}


def recipes() -> Iterator[Wrong]:
    for kind in SOURCES:
        yield wrong("train", f"source_{kind}.py")
        yield wrong("check", f"source_{kind}.py")
    for kind in TASKS:
        yield wrong("train", f"task_{kind}.py", named="problem")
        yield wrong("check", f"task_{kind}.py", named="problem")
    for kind in REWARDS:
        yield wrong("sample", f"reward_{kind}.py", "--out", "out", named="reward")
    for kind in FUNCTIONS:
        yield wrong("sample", f"function_{kind}.py", "--out", "out", named="right")


TOY_FILE = "toy.py"
KINDS = (commands, fields, options, files, models, recipes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that is wrong, one run and a few things that are right."""
    folder = tmp_path_factory.mktemp("wrong")
    shutil.copy(TOY, folder / TOY_FILE)
    shutil.copy(SUMS, folder / "tiny_sums.py")
    (folder / "folder").mkdir()
    (folder / "folder" / "x").write_text("x")
    (folder / "folder.jsonl").mkdir()
    (folder / "folder.py").mkdir()
    (folder / "folder.html").mkdir()
    (folder / "runs").mkdir()
    (folder / "text.txt").write_text("text")
    (folder / "answers.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    for ending, contents in (("jsonl", JSONL), ("toml", TOML), ("json", JSON)):
        for kind, content in contents.items():
            (folder / f"{kind}.{ending}").write_bytes(content)
    inline(folder / "run", "--steps", "2", source=folder / TOY_FILE)
    for kind, content in JSON.items():
        shutil.copytree(folder / "run", folder / f"run-{kind}")
        (folder / f"run-{kind}" / "recipe.json").write_bytes(content)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 14}
    for kind in ("truncated", "binary", "config", "shapes", "none"):
        model = folder / f"model-{kind}"
        model.mkdir()
        (model / "config.json").write_text("{" if kind == "config" else json.dumps(config))
        if kind != "none":
            save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, model / "model.safetensors")
        whole = (model / "model.safetensors").read_bytes() if kind != "none" else b""
        if kind in ("truncated", "binary"):
            (model / "model.safetensors").write_bytes(whole[:40] if kind == "truncated" else BINARY)
    for kind, content in (("empty", b""), ("binary", BINARY), ("truncated", b"GGUF\3\0\0\0")):
        (folder / f"{kind}.gguf").write_bytes(content)
    for kind, source in SOURCES.items():
        (folder / f"source_{kind}.py").write_text(source)
    for what, part, kinds in (
        ("task", "problems", TASKS),
        ("reward", "reward", REWARDS),
        ("function", "function", FUNCTIONS),
    ):
        for kind, source in kinds.items():
            own = GOOD | {part: source} | ({"wanted": ", answer"} if kind == "unknown" else {})
            (folder / f"{what}_{kind}.py").write_text(FILE.format(**own))
    (folder / "jsonl.py").write_text(
        "from dataclasses import replace\nfrom pathlib import Path\nimport tba\nfrom tiny_sums import recipe as tiny\n"
        "recipe = replace(tiny, task=tba.Jsonl(train=Path('answers.jsonl')), name='jsonl')\n"
    )
    return folder


def tree(*folders: Path) -> dict[str, int]:
    """Every file and folder below, with its size; not what opening a run that is there leaves: its locks, the shared
    memory of SQLite, its log of stops, and its record of what an import refused.
    """
    own = re.compile(r"lock|ending|.*-import|.*-shm|.*-wal|imports\.jsonl|.*\.pyc|__pycache__")
    found = (path for folder in folders for path in folder.rglob("*") if not own.fullmatch(path.name))
    return {str(path): path.stat().st_size if path.is_file() else -1 for path in found}


def children() -> set[int]:
    """The processes that this one has started and that are there."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def test_there_are_more_than_600() -> None:
    assert len({case.words for kind in KINDS for case in kind()}) >= 600


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_input_is_answered_in_one_sentence_and_leaves_no_file_and_no_process(
    kind: Callable[[], Iterator[Wrong]],
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files: in the place itself and in the folder of temporary files."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, running, wrong = tree(place, tmp_path), children(), []
    for case in dict.fromkeys(kind()):
        try:
            code = main(case.words)
        except Exception as error:
            error.add_note(f"tba {case}")
            raise
        said = capsys.readouterr().err
        sentence = re.fullmatch(r"tba: [^\n]{20,1500}\n", said) and re.search(r"[:;,.?] |\?| needs ", said[5:])
        if code != 2 or not sentence or "Traceback" in said or case.named not in said:
            wrong.append(f"tba {case}: {code}, {said[:400]}")
        now = tree(place, tmp_path)
        wrong += [f"tba {case}: changed {name}" for name in dict(now.items() ^ before.items())]
        wrong += [f"tba {case}: left a process"] * (children() != running)
        before, running = now, children()
    assert not wrong, "\n".join(wrong)
