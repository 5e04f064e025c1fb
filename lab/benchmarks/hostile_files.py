"""Damages files that come from outside at random, and reads them: does each end in a value or in one sentence?

    python lab/benchmarks/hostile_files.py [--files 50] [--kinds parquet,gguf] [--seed 0]

The kinds: rows in Parquet, CSV, JSON Lines and JSON; a model's folder, a GGUF file, an adapter; a TOML file of fields;
names of runs. A file gets one to three of these: bits flipped, a piece that is zero, random or doubled, a number made
as large as its bytes allow, its end cut off, another kind's content in its place. Each is read in a process of its
own, with 8 GB of memory and a minute. What is required: no traceback, no signal, no hang, and nothing in the sentence
that a terminal obeys. A damaged file may be read all the same: a changed digit is a digit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tba.config_file import with_config
from tba.errors import TbaError
from tba.models.gguf import convert_once
from tba.models.source import resolve_model_path
from tba.policy.loading import load_model
from tba.recipes.quickstart import BASE
from tba.runtime.run_directory import new_path
from tba.tasks.problem_rows import read_rows

STORIES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "stories260K" / "stories260K.gguf"
SECONDS, BYTES = 60, 8 << 30
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{a}+{b}=", "answer": {"value": a + b, "parts": [a, b]}} for a in range(20) for b in range(20)
]
ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": str(BASE),
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
}
NAMES = "abc-_./\\~ \n\t\0\x1b[31m\u202e\ud7ff$(`';&|<>%é漢"


def parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def written(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


def gguf(folder: Path) -> Path:
    return Path(shutil.copy(STORIES, folder / "model.gguf"))


def model(folder: Path) -> Path:
    shutil.copytree(BASE, folder / "model")
    return folder / "model" / random.choice(("config.json", "model.safetensors", "tokenizer.json"))


def adapter(folder: Path) -> Path:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(ADAPTER))
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": torch.randn(2, 96), f"{name}.lora_B.weight": torch.randn(96, 2)}
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    return folder / "adapter" / random.choice(("adapter_config.json", "adapter_model.safetensors"))


def load(path: Path) -> object:
    return load_model(path.parent, "cpu", torch.float32)


CSV = "prompt,answer\n" + "".join(f'"{row["prompt"]}",{row["answer"]["value"]}\n' for row in ROWS)
TOML = 'steps = 200\nseed = 3\n[optimizer]\nlr = 1e-4\n[evaluation]\ngreedy = false\n[task]\ndigits = 3\nname = "a"\n'
KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {  # what makes a file, and what reads it
    "parquet": (parquet, read_rows),
    "csv": (written("rows.csv", CSV), read_rows),
    "jsonl": (written("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)), read_rows),
    "json": (written("rows.json", json.dumps({"train": ROWS})), read_rows),
    "model": (model, load),
    "gguf": (gguf, lambda path: convert_once(path, lambda line: None)),
    "adapter": (adapter, lambda path: resolve_model_path(str(path.parent), lambda line: None)),
    "toml": (written("fields.toml", TOML), lambda path: with_config(["--config", str(path)])),
    "name": (
        written("name", "run"),
        lambda path: new_path(path.parent, "a", path.read_text("utf-8", "surrogateescape")),
    ),
}


def damage(path: Path, kind: str, rng: random.Random) -> None:
    """Change the bytes of a file."""
    if kind == "name":
        path.write_text("".join(rng.choices(NAMES, k=rng.choice((1, 3, 10, 300)))))
        return
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(max(1, len(content))), rng.choice((1, 8, 64, 4096))
        match rng.randrange(7):
            case 0:
                for _ in range(size):
                    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 1:
                content[at : at + size] = bytes(size)
            case 2:
                content[at : at + size] = rng.randbytes(size)
            case 3:
                content[at:at] = content[at : at + size]
            case 4:
                content[at : at + 8] = b"\xff" * 7 + b"\x7f"
            case 5:
                del content[max(1, at) :]
            case 6:
                content[: min(64, len(content))] = STORIES.read_bytes()[:64] if kind != "gguf" else b"PAR1" * 16
    path.write_bytes(content)


def end_of(path: Path, read: Callable[[Path], object]) -> str:
    """Returns how reading ends, in a process of its own: `read`, `refused`, or what is wrong."""
    out, back = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        with open(back, "w", errors="backslashreplace") as answer:
            print(_end_here(path, read), file=answer, flush=True)
        os._exit(0)
    os.close(back)
    with open(out) as answer:
        text = answer.read().strip()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return text or f"exit code {os.WEXITSTATUS(status)}"


def _end_here(path: Path, read: Callable[[Path], object]) -> str:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.alarm(3 * SECONDS)
    try:
        read(path)
    except TbaError as error:
        return "refused" if str(error).isprintable() else f"not printable: {error!r}"
    except MemoryError:
        return "no memory"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:120]!r}"
    return "read"


def main() -> int:
    """The exit code: 1 when some file ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=50, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    print("| kind | files | read | refused in a sentence | otherwise |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TBA_CACHE"] = str(Path(temporary) / "cache")
        for kind in options.kinds.split(","):
            make, read = KINDS[kind]
            end_counts: Counter[str] = Counter()
            for number in range(options.files):
                random.seed(f"{options.seed} {kind} {number}")
                folder = Path(temporary) / f"{kind}-{number}"
                folder.mkdir()
                path = make(folder)
                damage(path, kind, random.Random(f"{options.seed} {kind} {number} damage"))
                end_counts[end_of(path, read)] += 1
                shutil.rmtree(folder)
            failures = {end: count for end, count in end_counts.items() if end not in ("read", "refused")}
            bad += sum(failures.values())
            print(
                f"| {kind} | {options.files} | {end_counts['read']} | {end_counts['refused']} | {failures or 0} |",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
