"""What the tasks `instruct` and `ifeval` show of a model before and after: by kind, differences paired by prompt.

    python lab/benchmarks/instruct.py kinds RUN [--csv FILE]
    python lab/benchmarks/instruct.py kinds BEFORE.jsonl AFTER.jsonl [AFTER.jsonl ...] [--kinds held_out] [--csv FILE]
    python lab/benchmarks/instruct.py ifeval BEFORE.jsonl [AFTER.jsonl] --data input_data.jsonl
    python lab/benchmarks/instruct.py samples RUN [--count 10]
    python lab/benchmarks/instruct.py perplexity RUN

A RUN has the answers of its first and its last evaluation; the files are what `tba eval ... --texts FILE` wrote;
each AFTER has columns of its own. Every answer is graded again, instruction by instruction. The perplexity is that of
the first and the last 512 answers of a run's journal under its reference, at the temperature of the policy.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tba
from tba.evaluation.estimators import paired_difference, wilson_interval
from tba.rewards.ifeval import fulfils, loose_forms
from tba.rewards.instructions import is_fulfilled
from tba.tasks.ifeval import IfEval
from tba.tasks.instruct import Instruct
from tba.types import Problem, Version

Answers = Mapping[str, str]  # by prompt; one answer each
Rows = list[tuple[Any, ...]]  # kind, n, before, after, the interval of the difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kinds", "ifeval", "samples", "perplexity"])
    parser.add_argument("answers", nargs="+", type=Path)
    parser.add_argument("--kinds", default="trained", choices=["trained", "held_out"])
    parser.add_argument("--data", type=Path, help="IFEval's input_data.jsonl")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--count", type=int, default=10)
    given = parser.parse_args()
    if given.what == "perplexity":
        perplexity(given.answers[0])
        return
    pair = of_run(given.answers[0]) if given.answers[0].is_dir() else [of_file(path) for path in given.answers]
    if given.what == "ifeval":
        ifeval(pair, IfEval(str(given.data)).problems("eval"))
    elif given.what == "samples":
        samples(pair, Instruct().problems("eval"), given.count)
    else:
        problems = Instruct(kinds=given.kinds).problems("eval")
        names = [path.stem for path in given.answers[1:] or given.answers]
        kinds(names, [by_kind([pair[0], after], problems) for after in pair[1:]], given.csv)


def kinds(names: Sequence[str], found: Sequence[Rows], table: Path | None) -> None:
    """Print a Markdown table of what came after by kind, all prompts first, and write its rows to a csv file."""
    columns = "".join(f" {name} | difference, paired, 95 % |" for name in names)
    print(f"| | n | before |{columns}\n{'|---' * (3 + 2 * len(names))}|")
    for runs in zip(*(rows[::-1][:2] + rows[:-2] for rows in found), strict=True):
        kind, n, before = runs[0][:3]
        cells = (f" {after:.1%} | {after - before:+.1%} [{low:+.1%}, {high:+.1%}] |" for *_, after, low, high in runs)
        print(f"| {kind} | {n} | {before:.1%} |{''.join(cells)}")
    if table is not None:
        with table.open("w", newline="") as file:
            lines = [(name, *row) for name, rows in zip(names, found, strict=True) for row in rows]
            head = ("run", "kind", "n", "before", "after", "low", "high")
            csv.writer(file, lineterminator="\n").writerows([head, *lines])


def perplexity(run: Path, count: int = 512) -> None:
    """exp of the mean over tokens of -log p under the reference, of the first and the last answers that arrived."""
    scores = [t.log_reference for t in tba.open_run(run).trajectories()]
    for name, part in (("first", scores[:count]), ("last", scores[-count:])):
        log_N = np.concatenate(part)
        print(f"{name:5} {len(part)} answers, {len(log_N):,} tokens: perplexity {np.exp(-log_N.mean()):.2f}")


def of_file(path: Path) -> Answers:
    return {line["prompt"]: line["response"] for line in map(json.loads, path.read_text().splitlines())}


def of_run(run: Path) -> list[Answers]:
    """The answers of the first and of the last evaluation of a run."""
    lines = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    versions = [Version.parse(line["version"]) for line in lines]
    return [
        {line["prompt"]: line["completion"] for line, version in zip(lines, versions, strict=True) if version == one}
        for one in (min(versions), max(versions))
    ]


def matched(answers: Sequence[Answers], problems: Sequence[Problem]) -> list[tuple[Problem, list[str]]]:
    """The problems that all have answered, each with its answers: a prompt holds its question."""
    by_question = [{prompt.split("<|im_start|>user\n")[-1]: text for prompt, text in one.items()} for one in answers]
    found = []
    for problem in problems:
        asked = question(problem)
        texts = [next((t for p, t in one.items() if p.startswith(asked + "<|im_end|>")), None) for one in by_question]
        if all(text is not None for text in texts):
            found.append((problem, [str(text) for text in texts]))
    return found


def question(problem: Problem) -> str:
    """Returns the only message of a problem."""
    assert not isinstance(problem.prompt, str)
    return str(problem.prompt[0]["content"])


def by_kind(answers: Sequence[Answers], problems: Sequence[Problem]) -> Rows:
    """A row a kind, then all instructions, then whole prompts: n, before, after, the interval of the difference."""
    marks: dict[str, list[list[bool]]] = defaultdict(list)
    for problem, texts in matched(answers, problems):
        verdicts = []
        for one in problem.fields["instructions"]:
            verdicts.append([is_fulfilled(one, problem.fields["question"], text) for text in texts])
            marks[one["kind"]].append(verdicts[-1])
        marks["~instructions"] += verdicts
        marks["~prompts: all of their instructions"].append([all(row) for row in zip(*verdicts, strict=True)])
    rows = []
    for name, found in sorted(marks.items()):
        before, after = np.array(found, float).T
        d = paired_difference(before, after)
        rows.append((name.lstrip("~"), len(found), before.mean(), after.mean(), d.low, d.high))
    return rows


def ifeval(answers: Sequence[Answers], problems: Sequence[Problem]) -> None:
    """Strict and loose, by prompt and by instruction, as IFEval has them."""
    pairs = matched(answers, problems)
    found: dict[str, list[list[bool]]] = defaultdict(list)
    for problem, texts in pairs:
        asked = problem.fields["question"]
        kinds = list(zip(problem.fields["instruction_id_list"], problem.fields["kwargs"], strict=True))
        for reading in ("strict", "loose"):
            forms = [loose_forms(text) if reading == "loose" else [text] for text in texts]
            rows = [[any(fulfils(kind, args, asked, f) for f in form) for form in forms] for kind, args in kinds]
            found[f"{reading}, instructions"] += rows
            found[f"{reading}, prompts"].append([all(row) for row in zip(*rows, strict=True)])
    for name, rows in found.items():
        columns = np.array(rows, float).T
        said = []
        for column in columns:
            interval = wilson_interval(column.sum(), len(column))
            said.append(f"{column.mean():.1%} [{interval.low:.1%}, {interval.high:.1%}]")
        if len(columns) == 2:
            d = paired_difference(*columns)
            said.append(f"difference {d.estimate:+.1%} [{d.low:+.1%}, {d.high:+.1%}]")
        print(f"{name:22} {len(rows):4}   {'   '.join(said)}")


def samples(answers: Sequence[Answers], problems: Sequence[Problem], count: int) -> None:
    """The first answers before and after, with what they fulfil."""
    for problem, texts in matched(answers, problems)[:count]:
        print(f"- **{question(problem)}**")
        for when, text in zip(("before", "after"), texts, strict=True):
            kept = [is_fulfilled(one, problem.fields["question"], text) for one in problem.fields["instructions"]]
            print(f"  - {when} ({sum(kept)} of {len(kept)}): {' / '.join(text.split(chr(10)))}")


if __name__ == "__main__":
    main()
