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
    options = parser.parse_args()
    if options.what == "perplexity":
        print_perplexity(options.answers[0])
        return
    paths: list[Path] = options.answers
    pair = first_and_last_answers(paths[0]) if paths[0].is_dir() else [read_answer_file(path) for path in paths]
    if options.what == "ifeval":
        print_ifeval(pair, IfEval(str(options.data)).problems("eval"))
    elif options.what == "samples":
        print_samples(pair, Instruct().problems("eval"), options.count)
    else:
        problems = Instruct(kinds=options.kinds).problems("eval")
        names = [path.stem for path in options.answers[1:] or options.answers]
        print_kinds(names, [rows_by_kind([pair[0], after], problems) for after in pair[1:]], options.csv)


def print_kinds(names: Sequence[str], rows_by_run: Sequence[Rows], table: Path | None) -> None:
    """Print a Markdown table of what came after by kind, all prompts first, and write its rows to a csv file."""
    columns = "".join(f" {name} | difference, paired, 95 % |" for name in names)
    print(f"| | n | before |{columns}\n{'|---' * (3 + 2 * len(names))}|")
    for runs in zip(*(rows[::-1][:2] + rows[:-2] for rows in rows_by_run), strict=True):
        kind, n, before = runs[0][:3]
        cells = (f" {after:.1%} | {after - before:+.1%} [{low:+.1%}, {high:+.1%}] |" for *_, after, low, high in runs)
        print(f"| {kind} | {n} | {before:.1%} |{''.join(cells)}")
    if table is not None:
        with table.open("w", newline="") as file:
            lines = [(name, *row) for name, rows in zip(names, rows_by_run, strict=True) for row in rows]
            head = ("run", "kind", "n", "before", "after", "low", "high")
            csv.writer(file, lineterminator="\n").writerows([head, *lines])


def print_perplexity(run: Path, count: int = 512) -> None:
    """Prints the perplexity under the reference, over tokens, of the first and the last answers that arrived."""
    scores = [t.log_reference for t in tba.open_run(run).trajectories()]
    for name, part in (("first", scores[:count]), ("last", scores[-count:])):
        log_N = np.concatenate(part)
        print(f"{name:5} {len(part)} answers, {len(log_N):,} tokens: perplexity {np.exp(-log_N.mean()):.2f}")


def read_answer_file(path: Path) -> Answers:
    return {line["prompt"]: line["response"] for line in map(json.loads, path.read_text().splitlines())}


def first_and_last_answers(run: Path) -> list[Answers]:
    """Returns the answers of the first and of the last evaluation of a run."""
    lines = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    versions = [Version.parse(line["version"]) for line in lines]
    return [
        {line["prompt"]: line["completion"] for line, version in zip(lines, versions, strict=True) if version == end}
        for end in (min(versions), max(versions))
    ]


def answered_by_all(answers: Sequence[Answers], problems: Sequence[Problem]) -> list[tuple[Problem, list[str]]]:
    """Returns the problems that all have answered, each with its answers: a prompt holds its question."""
    by_question = [{prompt.split("<|im_start|>user\n")[-1]: text for prompt, text in a.items()} for a in answers]
    pairs = []
    for problem in problems:
        start = question(problem) + "<|im_end|>"
        texts = [next((t for prompt, t in a.items() if prompt.startswith(start)), None) for a in by_question]
        if all(text is not None for text in texts):
            pairs.append((problem, [str(text) for text in texts]))
    return pairs


def question(problem: Problem) -> str:
    """Returns the only message of a problem."""
    assert not isinstance(problem.prompt, str)
    return str(problem.prompt[0]["content"])


def rows_by_kind(answers: Sequence[Answers], problems: Sequence[Problem]) -> Rows:
    """Returns a row for each kind, for all instructions, and for whole prompts: n, before, after, and the interval of
    the difference.
    """
    marks: dict[str, list[list[bool]]] = defaultdict(list)
    for problem, texts in answered_by_all(answers, problems):
        verdicts = []
        for instruction in problem.fields["instructions"]:
            verdicts.append([is_fulfilled(instruction, problem.fields["question"], text) for text in texts])
            marks[instruction["kind"]].append(verdicts[-1])
        marks["~instructions"] += verdicts
        marks["~prompts: all of their instructions"].append([all(row) for row in zip(*verdicts, strict=True)])
    rows = []
    for name, mark_rows in sorted(marks.items()):
        marks_before, marks_after = np.array(mark_rows, float).T
        d = paired_difference(marks_before, marks_after)
        rows.append((name.lstrip("~"), len(mark_rows), marks_before.mean(), marks_after.mean(), d.low, d.high))
    return rows


def print_ifeval(answers: Sequence[Answers], problems: Sequence[Problem]) -> None:
    """Prints IFEval's accuracies: strict and loose, by prompt and by instruction."""
    pairs = answered_by_all(answers, problems)
    rows_by_reading: dict[str, list[list[bool]]] = defaultdict(list)
    for problem, texts in pairs:
        prompt = problem.fields["question"]
        kinds = list(zip(problem.fields["instruction_id_list"], problem.fields["kwargs"], strict=True))
        for reading in ("strict", "loose"):
            forms = [loose_forms(text) if reading == "loose" else [text] for text in texts]
            rows = [[any(fulfils(kind, args, prompt, f) for f in form) for form in forms] for kind, args in kinds]
            rows_by_reading[f"{reading}, instructions"] += rows
            rows_by_reading[f"{reading}, prompts"].append([all(row) for row in zip(*rows, strict=True)])
    for name, rows in rows_by_reading.items():
        columns = np.array(rows, float).T
        cells = []
        for column in columns:
            interval = wilson_interval(column.sum(), len(column))
            cells.append(f"{column.mean():.1%} [{interval.low:.1%}, {interval.high:.1%}]")
        if len(columns) == 2:
            d = paired_difference(*columns)
            cells.append(f"difference {d.estimate:+.1%} [{d.low:+.1%}, {d.high:+.1%}]")
        print(f"{name:22} {len(rows):4}   {'   '.join(cells)}")


def print_samples(answers: Sequence[Answers], problems: Sequence[Problem], count: int) -> None:
    """Prints the first answers before and after, with the number of instructions that they fulfil."""
    for problem, texts in answered_by_all(answers, problems)[:count]:
        print(f"- **{question(problem)}**")
        for moment, text in zip(("before", "after"), texts, strict=True):
            instructions = problem.fields["instructions"]
            verdicts = [is_fulfilled(instruction, problem.fields["question"], text) for instruction in instructions]
            print(f"  - {moment} ({sum(verdicts)} of {len(verdicts)}): {' / '.join(text.split(chr(10)))}")


if __name__ == "__main__":
    main()
