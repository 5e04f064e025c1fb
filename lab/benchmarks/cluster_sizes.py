"""What a run is sized to on clusters of many shapes, by Qwen2.5's sizes and what is trained. Nothing is loaded or run.

    python lab/benchmarks/cluster_sizes.py [--before CLONE]

The recipe is `math` with a configuration alone in the place of its model, on the `cluster` runtime, with nodes as
`--cluster.nodes` describes them. Each row says whether the run fits or is refused, ranks, searchers, GPUs of each
engine, GPUs on which nothing runs, and what the fullest GPU needs. Rows go to lab/results/cluster_sizes.csv, and a
table for each engine to the terminal.

`--before` adds the rows of a clone at commit e85a5d76, whose clusters were not sized: what was placed there, whether it
fits or not.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.policy.lora import LoraSettings
from tba.recipe import Recipe
from tba.runtime.needs import needs
from tba.settings import find, override

ROWS = Path(__file__).parents[1] / "results" / "cluster_sizes.csv"
MODELS = {  # width, layers, feed-forward width, heads, key-value heads, vocabulary, tied embeddings
    "0.5 B": (896, 24, 4864, 14, 2, 151_936, True),
    "1.5 B": (1536, 28, 8960, 12, 2, 151_936, True),
    "7 B": (3584, 28, 18_944, 28, 4, 152_064, False),
    "14 B": (5120, 48, 13_824, 40, 8, 152_064, False),
    "32 B": (5120, 64, 27_648, 40, 8, 152_064, False),
    "72 B": (8192, 80, 29_568, 64, 8, 152_064, False),
}
KINDS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora": LoraSettings(rank=16)},
    "LoRA 4-bit": {"lora": LoraSettings(rank=16), "dtype": "4-bit"},
}
NODES = {"1 x 24": "1x1x24", "1 x 80": "1x1x80", "8 x 80": "1x8x80", "8 x 8 x 80": "8x8x80", "8 x 8 x 141": "8x8x141"}


@dataclass(frozen=True)
class Row:
    """One case, and what it was sized to."""

    code: str
    model: str
    trained: str
    engine: str
    gpus: str
    outcome: str  # fits, refused, or not checked
    ranks: int
    searchers: int
    gpus_per_searcher: int
    idle: int
    fullest_gpu_gb: float
    words: str  # of the refusal, or about idle GPUs


@cache
def folder_of(model: str) -> str:
    """Returns a folder with the configuration of a model, which is all that sizes need."""
    width, layers, ff, heads, kv_heads, vocabulary, is_tied = MODELS[model]
    folder = tempfile.mkdtemp()
    Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ff,
        max_position_embeddings=32_768,
        tie_word_embeddings=is_tied,
    ).save_pretrained(folder)
    return folder


def recipe_of(model: str, trained: str, engine: Any) -> Recipe:
    """Returns `math` with a model of this size, on a cluster's GPUs."""
    recipe = find("math")
    assert isinstance(recipe.model, HuggingFace)
    generation = replace(recipe.model.generation, engine=engine)
    sized = replace(recipe.model, path=folder_of(model), device="cuda", generation=generation, **KINDS[trained])
    return replace(recipe, model=sized, runtime="cluster")


def cases() -> Iterator[tuple[str, str, str, str]]:
    """Yields model, kind, engine and GPUs of each case."""
    for model in MODELS:
        for trained in KINDS:
            for engine in ("transformers",) if trained == "LoRA 4-bit" else ("transformers", "vllm"):
                yield from ((model, trained, engine, gpus) for gpus in NODES)


def fullest_gb(recipe: Recipe, searchers: int, ranks: int, gpus: int) -> float:
    """Returns what the fullest GPU needs, in GB; all is on it where there is one."""
    bytes_of = {need.part: need.total for need in needs(recipe) if need.device == "cuda"}
    trainer = bytes_of.pop("trainer")
    searcher = sum(bytes_of.values())
    return (trainer * ranks + searcher * searchers if gpus == 1 else max(trainer, searcher)) / 1e9


def sized_row(model: str, trained: str, engine: str, gpus: str) -> Row:
    """Returns what a case is sized to now."""
    from tba.runs.recipe_resolution import hardware_of
    from tba.runtime.sizing import refuse_what_cannot_fit, sizing_flags, unused_gpus

    recipe = recipe_of(model, trained, engine)
    recipe = override(recipe, ["--cluster.nodes", NODES[gpus]], "", recorded=True)
    hardware = hardware_of(recipe)
    recipe = override(recipe, sizing_flags(recipe, hardware), "", recorded=True)
    outcome, idle_words = "fits", unused_gpus(recipe, hardware) or ""
    words = idle_words
    try:
        refuse_what_cannot_fit(recipe, hardware)
    except UserError as error:
        outcome, words = "refused", str(error)
    idle = int(idle_words.partition(" ")[0]) if idle_words else 0
    counts = recipe.trainer.count, recipe.searcher_count
    fullest_gpu_gb = fullest_gb(recipe, counts[1], counts[0], len(hardware.gpus))
    sizes = (*counts, recipe.model.gpus_per_searcher, idle, round(fullest_gpu_gb, 1))
    return Row("after", model, trained, engine, gpus, outcome, *sizes, words)


def unsized_row(model: str, trained: str, engine: str, gpus: str) -> Row:
    """Returns where a case was placed at e85a5d76, which neither sized nor refused it."""
    from tba.runtime.cluster.placement import Node, plan

    recipe, (count, each, _) = recipe_of(model, trained, engine), map(int, NODES[gpus].split("x"))
    nodes = [Node(str(i), f"node {i}", 64, each, 1e12, here=not i) for i in range(count)]
    placements = plan(recipe, nodes, [f"searcher-{i}" for i in range(recipe.searcher_count)])
    used_gpus = Counter(placement.resources["GPU"] > 0 for placement in placements)[True]
    fullest_gpu_gb = fullest_gb(recipe, recipe.searcher_count, recipe.trainer.count, count * each)
    sizes = (recipe.trainer.count, recipe.searcher_count, recipe.model.gpus_per_searcher)
    idle = max(0, count * each - used_gpus)
    return Row("before", model, trained, engine, gpus, "not checked", *sizes, idle, round(fullest_gpu_gb, 1), "")


def rows_of(clone: Path) -> list[Row]:
    """Returns the rows that the code of a clone gives."""
    command = [sys.executable, __file__, "--print-before"]
    environment = {**os.environ, "PYTHONPATH": str(clone / "src")}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [Row(*values) for values in json.loads(output)]


def table(rows: list[Row]) -> Iterator[str]:
    """Yields a table in Markdown: ranks + searchers of what fits, else what the fullest GPU would need."""
    cells = {(row.model, row.trained, row.gpus): row for row in rows}
    yield f"| model | trained | {' | '.join(f'{gpus} GB' for gpus in NODES)} |"
    yield "|---" * (2 + len(NODES)) + "|"
    for model in MODELS:
        for trained in KINDS:
            texts = (cell(cells[model, trained, gpus]) for gpus in NODES)
            yield f"| {model} | {trained} | {' | '.join(texts)} |"


def cell(row: Row) -> str:
    """Returns what a row was sized to, in a few characters."""
    if row.outcome == "refused":
        return "no"
    engines = f" of {row.gpus_per_searcher}" if row.gpus_per_searcher > 1 else ""
    idle = f", {row.idle} idle" if row.idle else ""
    return f"{row.ranks} + {row.searchers}{engines}{idle}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="a clone at e85a5d76")
    parser.add_argument("--print-before", action="store_true", help="print the rows of this code's clusters as JSON")
    options = parser.parse_args()
    if options.print_before:
        print(json.dumps([[*vars(unsized_row(*case)).values()] for case in cases()]))
        return
    rows = [sized_row(*case) for case in cases()]
    earlier_rows = [] if options.before is None else rows_of(options.before)
    with ROWS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, vars(rows[0]).keys())
        writer.writeheader()
        writer.writerows(vars(row) for row in (*earlier_rows, *rows))
    for engine in ("transformers", "vllm"):
        engine_rows = [
            row for row in rows if row.engine == engine or row.trained == "LoRA 4-bit"
        ]  # transformers alone has it
        print(f"{engine}\n", *table(engine_rows), "", sep="\n")


if __name__ == "__main__":
    main()
